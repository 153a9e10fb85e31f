"""Independent subnet training: find neuron groups, partition them, and cut subnets out of a network."""
