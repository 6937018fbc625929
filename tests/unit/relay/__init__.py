"""keepstep_relay.core."""
