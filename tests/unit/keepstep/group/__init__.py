"""keepstep.group."""
