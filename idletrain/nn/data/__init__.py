"""Samples: dense arrays, sparse rows, files of extreme classification, and files far away."""
