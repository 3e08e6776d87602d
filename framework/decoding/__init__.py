"""The decode loop and what it stands on: sampling, the ragged KV cache and the transformers target."""
