"""keepstep.state."""
