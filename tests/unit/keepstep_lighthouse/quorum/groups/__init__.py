"""keepstep_lighthouse.quorum.groups."""
