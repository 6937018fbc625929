"""keepstep.relay_client."""
