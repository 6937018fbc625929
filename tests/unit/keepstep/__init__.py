"""keepstep."""
