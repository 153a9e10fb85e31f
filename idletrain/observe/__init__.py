"""What happened: records, the live display, summaries."""
