"""Heads that read the target's hidden states: blocks in one pass, small MLPs, multi-token prediction."""
