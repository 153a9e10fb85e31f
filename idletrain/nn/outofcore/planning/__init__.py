"""Plan training steps that need more memory than there is: pure functions of a network's profile."""
