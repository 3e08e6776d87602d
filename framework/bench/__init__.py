"""Measuring: a recipe's matrix, its cells side by side, and what a pass of a model costs."""
