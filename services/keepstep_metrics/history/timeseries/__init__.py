"""States and sums of one group over time. Pure."""
