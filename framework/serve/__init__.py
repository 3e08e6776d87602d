"""An OpenAI-compatible endpoint over the decode loop, for evaluation."""
