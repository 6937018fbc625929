"""keepstep_megatron."""
