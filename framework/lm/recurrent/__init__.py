"""Models with recurrent layers: their modules, and the cache that keeps their states."""
