"""The gRPC edge."""
