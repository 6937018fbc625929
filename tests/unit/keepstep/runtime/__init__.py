"""keepstep.runtime."""
