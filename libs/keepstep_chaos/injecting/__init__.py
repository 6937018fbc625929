"""Faults: inject each kind into a process, here or elsewhere, and undo it."""
