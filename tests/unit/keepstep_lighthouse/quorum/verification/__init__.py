"""keepstep_lighthouse.quorum.verification."""
