"""Jobs that start again and again: times, records, and what triggers them."""
