"""keepstep_lighthouse, all but the quorum."""
