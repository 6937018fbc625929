"""keepstep_formats."""
