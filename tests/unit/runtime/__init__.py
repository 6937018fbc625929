"""keepstep.runtime and keepstep.futures."""
