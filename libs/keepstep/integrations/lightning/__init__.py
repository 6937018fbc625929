"""Lightning on keepstep: ``Trainer(strategy="keepstep")`` after ``import keepstep.integrations.lightning``."""

from keepstep.integrations.lightning.model_parallel_strategy import KeepstepModelParallelStrategy
from keepstep.integrations.lightning.relay_checkpoints import RelayCheckpointIO
from keepstep.integrations.lightning.strategy import KeepstepStrategy

__all__ = ["KeepstepModelParallelStrategy", "KeepstepStrategy", "RelayCheckpointIO"]
