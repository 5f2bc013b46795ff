"""Helpers that tests of every kind share. Import them as `from support.eventually import eventually`."""
