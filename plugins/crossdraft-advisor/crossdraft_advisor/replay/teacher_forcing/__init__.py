"""Teacher-forced scoring of drafters on recorded responses."""
