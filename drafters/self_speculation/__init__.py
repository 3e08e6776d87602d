"""Drafters that are their target: some of its layers, parts of its layers, or guesses that ride in its own pass."""
