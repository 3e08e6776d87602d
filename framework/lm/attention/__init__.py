"""Attention of ragged batches: implementations, and layers that select keys."""
