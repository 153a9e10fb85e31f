"""Who does what next: the pure state machine, what is durable, the worker's task and the runner on Dask."""
