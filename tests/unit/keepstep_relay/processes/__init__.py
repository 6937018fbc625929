"""keepstep_relay.processes."""
