"""keepstep_lighthouse.quorum."""
