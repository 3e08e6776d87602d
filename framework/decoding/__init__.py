"""The decode loop, the transformers model under it, and the one place that builds a decoder."""
