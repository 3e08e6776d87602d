"""Drafters with a language model that has another tokenizer than the target."""
