"""Transformers models under the engine: ragged batches, caches, attention, CUDA graphs, layer subsets."""
