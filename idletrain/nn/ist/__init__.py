"""Independent subnets: neuron groups and how they are found, partitions, and the subnets cut by them."""
