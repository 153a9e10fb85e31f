"""What the network between nodes does, and what that means for training: measured, modelled, told, compared."""
