"""Measures links, collectives and training between the nodes of a cluster."""
