"""From acceptance and cost to a decision: which drafter, rule and draft length, or none."""
