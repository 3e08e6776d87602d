"""Resolution, loading and digests of models."""
