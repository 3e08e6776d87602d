"""Drafters with a draft model that shares the target's tokenizer."""
