"""The GPU half of the runtime: shader archives, plans, and the process that runs them (see README.md)."""
