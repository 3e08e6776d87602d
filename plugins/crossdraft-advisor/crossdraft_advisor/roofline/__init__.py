"""Roofline model of passes on accelerators that are not at hand."""
