"""What a measurement of a fabric says: statistics, cost models, comparisons and tables."""
