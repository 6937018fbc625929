"""keepstep.process_group."""
