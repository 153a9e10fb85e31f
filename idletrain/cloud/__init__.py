"""Runs on a cloud's machines: started, kept at their number, and taken down."""
