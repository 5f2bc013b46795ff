"""Where storage keeps things: records in SQL, bytes in a folder or a bucket."""
