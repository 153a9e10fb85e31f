"""Simulate a run on a fleet of thousands of nodes: the rules of rounds are the real ones, time and nodes are not."""
