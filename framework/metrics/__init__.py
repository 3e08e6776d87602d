"""Metrics of a cell, their intervals, and the component times that speed-ups are computed from."""
