"""The process on a node: attempts at subnets, its memory, and when it leaves."""
