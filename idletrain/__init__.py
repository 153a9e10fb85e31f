"""idletrain trains one neural network by independent subnets on machines that come and go."""
