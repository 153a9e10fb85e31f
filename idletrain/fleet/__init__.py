"""Where nodes come from: local processes, what a worker process does, and how nodes are taken."""
