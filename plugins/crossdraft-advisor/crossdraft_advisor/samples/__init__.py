"""Certificate of a foreign sampler: recorded draws compared with the target's distribution."""
