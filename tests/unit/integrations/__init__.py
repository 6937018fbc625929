"""Training frameworks and data libraries on keepstep."""
