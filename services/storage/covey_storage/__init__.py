"""Blobs by their SHA-256, checkpoints, and the records beside them."""
