"""Durable state that survives a head: the write-ahead log, updates, snapshots, and their copy in S3."""
