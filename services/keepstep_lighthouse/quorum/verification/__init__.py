"""Groups with equal steps have equal weights: comparisons, and consequences for those that differ. Pure."""
