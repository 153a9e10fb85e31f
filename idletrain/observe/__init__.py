"""Show and report a run: its records, their summary, live displays, the dashboard page, reports and metrics."""
