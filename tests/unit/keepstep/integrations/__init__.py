"""keepstep.integrations."""
