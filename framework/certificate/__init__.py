"""Is a pair lossless? By enumeration on exact models, and by samples of a real model's first token."""
