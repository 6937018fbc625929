"""Make gradients and buffers equal over the groups, for the public module ``ddp``."""
