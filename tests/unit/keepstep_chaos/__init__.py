"""keepstep_chaos."""
