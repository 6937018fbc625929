"""keepstep_relay.tiers."""
