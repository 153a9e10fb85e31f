"""Run steps by a plan, with tensors swapped, recomputed or streamed from disk."""
