"""Simulation of continuous batching with speculative decoding under an arrival process."""
