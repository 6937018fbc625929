"""Checkpoints of other programs, and their conversion."""
