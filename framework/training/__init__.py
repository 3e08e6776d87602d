"""Training drafters against a frozen target."""
