"""Measurements of idletrain against its targets; `python -m benchmarks` runs them all."""
