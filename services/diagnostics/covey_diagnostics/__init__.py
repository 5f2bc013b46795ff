"""Snapshots of what each participant is doing: reported in, watched live."""
