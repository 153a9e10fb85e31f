"""Local optimizers: the table of them, their steps on sparse rows, and compiled loops over rows."""
