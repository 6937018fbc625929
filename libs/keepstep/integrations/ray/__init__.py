"""Ray Train on keepstep: ``TorchTrainer(train, torch_config=KeepstepConfig(ranks=8), ...)``; 8 workers are a group."""

from keepstep.integrations.ray.config import KeepstepConfig
from keepstep.integrations.ray.function_context import GroupEndedError
from keepstep.integrations.ray.run_controller import TorchTrainer

__all__ = ["GroupEndedError", "KeepstepConfig", "TorchTrainer"]
