"""The ground floor: what drafters, verifiers, models and random numbers are to each other. Imports nothing of ours."""
