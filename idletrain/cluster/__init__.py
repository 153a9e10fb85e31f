"""The Dask cluster under a run: its scheduler, settings, certificates and local workers."""
