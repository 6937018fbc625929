"""keepstep_metrics."""
