"""Cost of model passes, measured or computed, and predicted speed-ups at any batch size."""
