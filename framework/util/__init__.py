"""Tensors, safe file reading and writing, limits, static trees: no drafting and no verification."""
