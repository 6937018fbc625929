"""keepstep.compat."""
