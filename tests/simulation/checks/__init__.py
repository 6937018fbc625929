"""Rules that every simulation must keep."""
