"""The gRPC edge: the coordinator's, storage's and diagnostics' client, and the local control service."""
