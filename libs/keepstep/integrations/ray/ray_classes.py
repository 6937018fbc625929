"""The classes of Ray Train that keepstep builds on."""

from __future__ import annotations

from typing import Any

try:
    import ray
    from ray.train.torch.config import TorchConfigContextManager
    from ray.train.v2._internal.constants import get_env_vars_to_propagate
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
    from ray.train.v2._internal.execution import worker_group
    from ray.train.v2._internal.execution.controller import controller, state
    from ray.train.v2.torch import torch_trainer, torchft_config
except ModuleNotFoundError as error:
    raise ImportError(
        f"keepstep.integrations.ray needs Ray Train with its TorchftConfig (missing: {error.name}): "
        f"pip install 'keepstep[ray]'"
    ) from error

Config: Any = torchft_config.TorchftConfig
Backend: Any = torchft_config._TorchftBackend  # noqa: SLF001  its only way to choose a lighthouse
FunctionContext: Any = TorchConfigContextManager

RaysTrainer: Any = torch_trainer.TorchTrainer
Controller: Any = controller.TrainController
Iteration: Any = controller.TrainControllerLoopIterationResult
Running: Any = state.RunningState
WorkerGroup: Any = worker_group.WorkerGroup
GroupOfWorkers: Any = worker_group.ReplicaGroup
PlacementHandle: Any = worker_group.PlacementGroupHandle
StartupFailed: Any = WorkerGroupStartupFailedError

__all__ = ["Backend", "Config", "FunctionContext", "get_env_vars_to_propagate", "ray"]
