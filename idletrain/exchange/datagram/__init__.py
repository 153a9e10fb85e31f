"""Bytes over UDP: receiver-driven credits, repairs by bitmap, an end before all is there (MLT, NSDI'24)."""
