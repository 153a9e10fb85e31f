"""AWS: its account, prices and machines; what its requests say and its answers mean."""
