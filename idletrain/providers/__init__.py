"""Providers of a run's workers: one protocol, one table, and the providers that need no cloud."""
