"""Measure the network between nodes, and say what it means for training."""
