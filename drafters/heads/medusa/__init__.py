"""Medusa: the drafter, its heads on disk, and their training."""
