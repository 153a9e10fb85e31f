"""Runs the steps of a plan: what is swapped, recomputed or streamed from disk."""
