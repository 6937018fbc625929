"""Decisions of a job with one copy of its model. Pure: no torch, no clock, no I/O."""
