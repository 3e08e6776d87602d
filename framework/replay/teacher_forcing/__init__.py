"""Drafts that drafters would have made along recorded responses, by teacher forcing."""
