"""The device side: picks a backend, runs the model package in a sandbox, reports."""
