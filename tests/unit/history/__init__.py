"""keepstep_history."""
