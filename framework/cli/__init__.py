"""The ``crossdraft`` command, a file for each subcommand."""
