"""Reports of runs: tables, Markdown, CSV and JSON."""
