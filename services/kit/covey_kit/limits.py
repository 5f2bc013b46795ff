"""Bounds that hold on every port."""

__all__ = ["BULK_BYTES", "MESSAGE_BYTES", "WINDOW_BYTES"]

MESSAGE_BYTES = 32 << 20
"""Largest message that is sent or accepted: room for a manifest of 100,000 chunks."""

BULK_BYTES = 1 << 20
"""Data in one message of a bulk stream: where gRPC is fastest."""

WINDOW_BYTES = 4 << 20
"""What a client may send ahead on one stream: a server's memory for it, and 40 MB/s at 100 ms round trip."""
