"""The gRPC edge of storage."""
