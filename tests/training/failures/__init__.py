"""Parts of a job that die, freeze, are cut off, or compute wrong values while it trains."""
