"""What a run prints: tables, plots and one self-contained HTML page."""
