"""keepstep_lighthouse."""
