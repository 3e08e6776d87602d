"""Building blocks of autoregressive drafters: a model with a cache, length policies, chains and trees."""
