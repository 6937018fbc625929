"""Formats of sharded checkpoints, registered by action, backend, and version."""

from __future__ import annotations

from keepstep.sharded.strategies.async_requests import AsyncCallsQueue, AsyncRequest
from keepstep.sharded.strategies.common_file import CommonFileLoad, CommonFileSave
from keepstep.sharded.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from keepstep.sharded.strategies.interfaces import (
    AsyncSaveShardedStrategy,
    CheckpointDir,
    LoadCommonStrategy,
    LoadShardedStrategy,
    LoadStrategyBase,
    SaveCommonStrategy,
    SaveShardedStrategy,
    SaveStrategyBase,
    ShardedMetadata,
    StrategyAction,
)
from keepstep.sharded.strategies.native import NativeLoadStrategy, NativeSaveStrategy
from keepstep.sharded.strategies.registry import get_default_strategy, register_default_strategy
from keepstep.sharded.strategies.stored_zarr import ZarrLoadShardedStrategy
from keepstep.sharded.strategies.torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "AsyncSaveShardedStrategy",
    "CheckpointDir",
    "CommonFileLoad",
    "CommonFileSave",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "LoadCommonStrategy",
    "LoadShardedStrategy",
    "LoadStrategyBase",
    "NativeLoadStrategy",
    "NativeSaveStrategy",
    "SaveCommonStrategy",
    "SaveShardedStrategy",
    "SaveStrategyBase",
    "ShardedMetadata",
    "StrategyAction",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "ZarrLoadShardedStrategy",
    "get_default_strategy",
    "register_default_strategy",
]
