"""Start scheduled runs from AWS itself: EventBridge Scheduler starts a machine that starts the run."""
