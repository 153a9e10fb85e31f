"""Payloads over UDP: receiver-driven credit, resends by bitmap, early completion (MLT, NSDI'24)."""
