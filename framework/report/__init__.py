"""Reports of runs: tables, charts, Markdown and HTML pages."""
