"""What one worker computes: neuron groups, partitions, subnets, local steps, models, data."""
