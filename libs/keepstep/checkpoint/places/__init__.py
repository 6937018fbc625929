"""The places of checkpoints: relays and directories."""
