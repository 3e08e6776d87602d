"""Entry points for users: generate, stream, and the one place that builds a decoder."""
