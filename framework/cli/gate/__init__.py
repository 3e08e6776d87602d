"""The `crossdraft gate` command."""
