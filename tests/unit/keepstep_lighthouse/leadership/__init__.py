"""keepstep_lighthouse.leadership."""
