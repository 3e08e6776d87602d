"""The `crossdraft advise` command."""
