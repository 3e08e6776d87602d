"""Certificates of losslessness, by enumeration on exact models and by samples of real ones."""
