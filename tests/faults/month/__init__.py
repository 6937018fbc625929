"""A simulated month of each service: real parts and files in virtual time. ``python -m tests.faults.month``."""
