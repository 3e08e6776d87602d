"""An OpenAI-compatible server for evaluation."""
