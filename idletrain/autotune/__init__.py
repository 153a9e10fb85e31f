"""Looks at a fleet, forecasts its rounds, and chooses the settings that a job leaves open."""
