"""Modules that nobody here wrote: whether idletrain takes each as it is, and what it learns."""
