"""Drafters with a draft model that has the target's tokenizer."""
