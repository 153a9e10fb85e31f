"""Where a run's workers come from: one protocol, one table, and the providers that need no cloud."""
