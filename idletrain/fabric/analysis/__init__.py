"""Analyse a fabric's measurement: statistics, cost models, comparisons and tables."""
