"""The coordinator: jobs, invitations, rounds and aggregation."""
