"""keepstep_relay."""
