"""The `crossdraft simulate` command."""
