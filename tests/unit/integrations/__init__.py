"""Training frameworks on keepstep."""
