"""Train beyond a node's memory by a plan of what to keep, swap and recompute (KARMA, arXiv 2008.11421)."""
