"""Public: storage of Meta's torch_checkpointing at a relay. Needs the package torch_checkpointing."""

from keepstep_formats.torch_checkpointing_storage import *  # noqa: F403
