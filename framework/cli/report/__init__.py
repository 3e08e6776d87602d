"""The `crossdraft report` command."""
