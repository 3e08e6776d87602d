"""The `crossdraft cost` command."""
