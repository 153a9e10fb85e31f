"""Probe a fleet, forecast its rounds, and choose the settings that a job leaves open."""
