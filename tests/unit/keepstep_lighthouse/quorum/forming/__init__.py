"""keepstep_lighthouse.quorum.forming."""
