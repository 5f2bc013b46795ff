"""What the coordinator keeps: SQL and files."""
