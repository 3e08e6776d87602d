"""Recommendation of a drafter, verifier and draft length from acceptance and cost."""
