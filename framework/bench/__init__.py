"""Measuring: recipes, prompts, cells, records, metrics and cost."""
