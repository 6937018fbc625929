"""The classes of Ray Train that keepstep builds on."""

from __future__ import annotations

from typing import Any

try:
    import ray
    from ray.train.torch.config import TorchConfigContextManager
    from ray.train.v2.torch import torchft_config
except ModuleNotFoundError as error:
    raise ImportError(
        f"keepstep.integrations.ray needs Ray Train with its TorchftConfig (missing: {error.name}): "
        f"pip install 'keepstep[ray]'"
    ) from error

Config: Any = torchft_config.TorchftConfig
Backend: Any = torchft_config._TorchftBackend  # noqa: SLF001  its only way to choose a lighthouse
FunctionContext: Any = TorchConfigContextManager

__all__ = ["Backend", "Config", "FunctionContext", "ray"]
