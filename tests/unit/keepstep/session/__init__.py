"""keepstep.session."""
