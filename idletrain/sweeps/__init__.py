"""Runs of one job with other settings, and which of them are worth going on with."""
