"""Samples: dense arrays, sparse rows, files of extreme classification, and files in S3."""
