"""What serving engines report and what they are told: one file an engine, read and written."""
