"""keepstep.connection."""
