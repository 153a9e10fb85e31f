"""One script a method: what every node of a comparison runs; see node.py for what they share."""
