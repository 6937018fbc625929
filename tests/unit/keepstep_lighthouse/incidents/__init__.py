"""keepstep_lighthouse.jobs."""
