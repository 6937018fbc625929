"""keepstep_lighthouse.quorum.probation."""
