"""Drafters with a smaller language model that shares the target's tokenizer."""
