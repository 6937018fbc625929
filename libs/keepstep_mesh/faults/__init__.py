"""Faults inside this process, on orders of ``keepstep chaos``."""
