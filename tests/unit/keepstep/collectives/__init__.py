"""keepstep.collectives."""
