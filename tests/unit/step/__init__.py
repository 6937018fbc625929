"""keepstep.step."""
