"""Start jobs on a schedule: cron times, stored schedules and their history, and the triggers that start them."""
