"""keepstep_metrics.history."""
