"""The modules of Lightning: of the package ``lightning``, or of ``pytorch_lightning`` if the script imports only that.

The two packages have the same classes twice, and a Trainer of one accepts no strategy of the other.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

_OLD = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
_PYTORCH, _FABRIC = ("pytorch_lightning", "lightning_fabric") if _OLD else ("lightning.pytorch", "lightning.fabric")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise ImportError(
            "keepstep.integrations.lightning needs Lightning: pip install 'keepstep[lightning]'"
        ) from error


callbacks: Any = _load(f"{_PYTORCH}.callbacks")
checkpoint_io: Any = _load(f"{_FABRIC}.plugins.io.checkpoint_io")
fabric_data: Any = _load(f"{_FABRIC}.utilities.data")
fabric_environments: Any = _load(f"{_FABRIC}.plugins.environments")
fabric_seed: Any = _load(f"{_FABRIC}.utilities.seed")
loops: Any = _load(f"{_PYTORCH}.loops.training_epoch_loop")
strategies: Any = _load(f"{_PYTORCH}.strategies")
trainer_states: Any = _load(f"{_PYTORCH}.trainer.states")
