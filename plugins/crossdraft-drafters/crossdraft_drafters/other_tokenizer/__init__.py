"""Drafters with a model whose tokenizer differs from the target's."""
