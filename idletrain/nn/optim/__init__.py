"""How parameters move: optimizers of sparse rows, and compiled loops over rows."""
