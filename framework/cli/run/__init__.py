"""The `crossdraft run` command."""
