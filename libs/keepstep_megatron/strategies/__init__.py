"""Formats of sharded checkpoints, registered by action, backend, and version."""

from __future__ import annotations

from keepstep_megatron.strategies.async_requests import AsyncCallsQueue, AsyncRequest
from keepstep_megatron.strategies.chosen import (
    get_default_strategy,
    register_default_strategy,
    set_default_backend,
)
from keepstep_megatron.strategies.common_file import CommonFileLoad, CommonFileSave
from keepstep_megatron.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from keepstep_megatron.strategies.interfaces import (
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
from keepstep_megatron.strategies.native import NativeLoadStrategy, NativeSaveStrategy
from keepstep_megatron.strategies.stored_zarr import ZarrLoadShardedStrategy
from keepstep_megatron.strategies.torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

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
    "set_default_backend",
]
