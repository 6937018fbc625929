"""keepstep.checkpoint."""
