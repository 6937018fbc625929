"""keepstep: per-step fault tolerance for PyTorch training. The worker library.

Names and modules are loaded when first used, so that ``keepstep.coordination`` works without torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from keepstep.checkpointing import CheckpointTransport, HTTPTransport, PGTransport, RelayTransport
    from keepstep.data import DistributedSampler, ElasticLoader, ElasticSampler
    from keepstep.ddp import DistributedDataParallel, PureDistributedDataParallel
    from keepstep.lifecycle.finishing import Finished
    from keepstep.manager import Manager, WorldSizeMode
    from keepstep.optim import OptimizerWrapper
    from keepstep.optim import OptimizerWrapper as Optimizer
    from keepstep.process_group import (
        ErrorSwallowingProcessGroupWrapper,
        FakeProcessGroupWrapper,
        ManagedProcessGroup,
        ProcessGroup,
        ProcessGroupBabyGloo,
        ProcessGroupBabyNCCL,
        ProcessGroupBabyXCCL,
        ProcessGroupDummy,
        ProcessGroupGloo,
        ProcessGroupNCCL,
        ProcessGroupWrapper,
        ProcessGroupXCCL,
    )

_HOME = {
    "Manager": "manager",
    "Finished": "lifecycle.finishing",
    "WorldSizeMode": "manager",
    "DistributedDataParallel": "ddp",
    "PureDistributedDataParallel": "ddp",
    "OptimizerWrapper": "optim",
    "DistributedSampler": "data",
    "ElasticLoader": "data",
    "ElasticSampler": "data",
    "CheckpointTransport": "checkpointing",
    "HTTPTransport": "checkpointing",
    "RelayTransport": "checkpointing",
    "PGTransport": "checkpointing",
    "ProcessGroup": "process_group",
    "ProcessGroupGloo": "process_group",
    "ProcessGroupNCCL": "process_group",
    "ProcessGroupXCCL": "process_group",
    "ProcessGroupBabyGloo": "process_group",
    "ProcessGroupBabyNCCL": "process_group",
    "ProcessGroupBabyXCCL": "process_group",
    "ProcessGroupDummy": "process_group",
    "ProcessGroupWrapper": "process_group",
    "ErrorSwallowingProcessGroupWrapper": "process_group",
    "FakeProcessGroupWrapper": "process_group",
    "ManagedProcessGroup": "process_group",
}

__all__ = [
    "Manager",
    "Finished",
    "WorldSizeMode",
    "DistributedDataParallel",
    "PureDistributedDataParallel",
    "Optimizer",
    "OptimizerWrapper",
    "DistributedSampler",
    "ElasticLoader",
    "ElasticSampler",
    "CheckpointTransport",
    "HTTPTransport",
    "RelayTransport",
    "PGTransport",
    "ProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupXCCL",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupWrapper",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ManagedProcessGroup",
]


def __getattr__(name: str) -> Any:
    name_there = "OptimizerWrapper" if name == "Optimizer" else name
    if name_there not in _HOME:
        if not name.startswith("_") and importlib.util.find_spec(f"keepstep.{name}") is not None:
            return importlib.import_module(f"keepstep.{name}")  # keepstep.process_group, as after `import torchft`
        raise AttributeError(f"module 'keepstep' has no attribute {name!r}")
    try:
        module = importlib.import_module(f"keepstep.{_HOME[name_there]}")
    except ModuleNotFoundError as error:
        if error.name in ("torch", "numpy", "xxhash"):
            raise ImportError(f"keepstep.{name} needs {error.name}: pip install 'keepstep[train]'") from error
        raise
    value = getattr(module, name_there)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
