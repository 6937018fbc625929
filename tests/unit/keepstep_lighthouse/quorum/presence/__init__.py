"""keepstep_lighthouse.quorum.presence."""
