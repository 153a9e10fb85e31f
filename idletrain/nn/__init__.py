"""The computation on one worker: neuron groups, partitions, subnets, local steps, models, data."""
