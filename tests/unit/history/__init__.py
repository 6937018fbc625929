"""keepstep_chaos.histories."""
