"""The faults that a simulation injects."""
