"""Ray Train on keepstep: ``TorchTrainer(train, torch_config=KeepstepConfig(), ...)``; each worker is a group."""

from keepstep.integrations.ray.config import KeepstepConfig
from keepstep.integrations.ray.function_context import GroupEndedError

__all__ = ["GroupEndedError", "KeepstepConfig"]
