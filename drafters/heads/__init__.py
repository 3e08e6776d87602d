"""Drafting heads that read the target's hidden states: Medusa, EAGLE-1 to -3, multi-token prediction."""
