"""The `crossdraft replay` command."""
