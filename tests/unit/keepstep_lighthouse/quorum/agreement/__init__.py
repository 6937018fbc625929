"""keepstep_lighthouse.quorum.agreement."""
