"""Benchmark of a recipe: its matrix of cells, measured in turns, and the cost of model passes."""
