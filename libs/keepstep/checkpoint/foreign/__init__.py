"""Checkpoints of other programs: torch.distributed.checkpoint, torch.save, safetensors. Runs no code from them."""
