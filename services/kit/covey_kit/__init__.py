"""What every service shares: serving, channels, errors, interceptors, logging, settings."""

import os

# gRPC's own log says again on stderr what its exceptions say. It reads this when it starts.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
