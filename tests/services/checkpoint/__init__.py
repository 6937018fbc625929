"""Checkpoints of several ranks, in real processes."""
