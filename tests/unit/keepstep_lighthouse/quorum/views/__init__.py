"""keepstep_lighthouse.quorum.views."""
