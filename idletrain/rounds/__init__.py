"""Rounds of training: the pure state machine, durable state, the worker's task and the runner on Dask."""
