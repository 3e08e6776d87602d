"""Recipes and prompts that ship with crossdraft, which `framework.recipe.builtin_recipes` finds."""
