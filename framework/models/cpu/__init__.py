"""Number of CPU threads, and contention for processors."""
