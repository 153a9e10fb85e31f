"""How long the modules of the catalogue are trained, and on how much data."""

SAMPLES, HELD_OUT, BATCH = 768, 256, 32
SUBNETS, STEPS, ROUNDS = 4, 12, 6  # 12 passes over the data
