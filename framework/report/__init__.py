"""What a run shows: tables, charts, pages of results."""
