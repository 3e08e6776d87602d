"""Models by name: found, fetched, loaded, and told apart by digest."""
