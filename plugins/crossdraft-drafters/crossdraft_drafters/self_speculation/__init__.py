"""Self-speculation: the target drafts with some of its layers or sublayers, or with guesses from its own pass."""
