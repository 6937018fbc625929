"""keepstep.checkpointing."""
