"""Recipes and prompts: parsing, validation, and positions for error messages."""
