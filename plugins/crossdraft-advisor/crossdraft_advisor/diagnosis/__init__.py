"""Hypotheses about low acceptance, and their likelihoods given what an engine counted."""
