"""keepstep.transfer."""
