"""What a pass costs, measured or computed, and what follows from it for any batch size."""
