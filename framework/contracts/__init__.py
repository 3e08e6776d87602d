"""Interfaces of drafters, verifiers, models and random numbers. Depends only on `util` and `errors`."""
