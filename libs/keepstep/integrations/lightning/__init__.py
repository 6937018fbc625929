"""Lightning on keepstep: ``Trainer(strategy="keepstep")`` after ``import keepstep.integrations.lightning``."""

from keepstep.integrations.lightning.relay_checkpoints import RelayCheckpointIO
from keepstep.integrations.lightning.strategy import KeepstepStrategy

__all__ = ["KeepstepStrategy", "RelayCheckpointIO"]
