"""What storage decides, in plain Python: who may read, when a write counts, what may be deleted."""
