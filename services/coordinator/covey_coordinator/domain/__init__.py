"""What the coordinator decides: plain Python and numpy, no I/O, no protobuf, no wall clock."""
