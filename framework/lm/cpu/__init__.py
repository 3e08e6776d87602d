"""Faster layers on a CPU: linear layers for few rows, and decoder layers compiled ahead of time."""
