"""Formats of other programs: torch.save, safetensors, torch.distributed.checkpoint (DCP), and torch_checkpointing.

Checkpoints in these formats are read and written without running code that they name. ``interchange`` converts whole
checkpoints; ``torch_storage`` and ``torch_checkpointing_storage`` are storages that these programs write to.
"""
