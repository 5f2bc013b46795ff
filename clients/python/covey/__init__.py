"""Covey: train one model on many devices."""
