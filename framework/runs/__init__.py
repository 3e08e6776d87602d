"""Runs on disk: records, state, shards, and marks of verifiers."""
