"""The `crossdraft certify` command."""
