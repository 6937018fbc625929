"""keepstep_relay.torch_view."""
