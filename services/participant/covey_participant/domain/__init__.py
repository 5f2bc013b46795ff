"""Decisions of the device side: plain Python without I/O, gRPC or a wall clock."""
