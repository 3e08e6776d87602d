"""What a run is, before and after it is measured: recipe, prompts, cells, metrics, records on disk."""
