"""The default strategy of each action, backend, and version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.strategies.common_file import CommonFileLoad, CommonFileSave
from keepstep_megatron.strategies.interfaces import LoadStrategyBase, SaveStrategyBase, StrategyAction
from keepstep_megatron.strategies.native import BACKEND, NativeLoadStrategy, NativeSaveStrategy
from keepstep_megatron.strategies.stored_zarr import ZarrLoadShardedStrategy
from keepstep_megatron.strategies.torch_dist import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy

Strategy = SaveStrategyBase | LoadStrategyBase

_strategies: dict[tuple[StrategyAction, str, int], Strategy | Callable[[], Strategy]] = {
    (StrategyAction.SAVE_SHARDED, BACKEND, 1): NativeSaveStrategy,
    (StrategyAction.LOAD_SHARDED, BACKEND, 1): NativeLoadStrategy,
    (StrategyAction.LOAD_COMMON, BACKEND, 1): NativeLoadStrategy,
    (StrategyAction.SAVE_SHARDED, "torch_dist", 1): TorchDistSaveShardedStrategy,
    (StrategyAction.LOAD_SHARDED, "torch_dist", 1): TorchDistLoadShardedStrategy,
    (StrategyAction.LOAD_SHARDED, "zarr", 1): ZarrLoadShardedStrategy,
    (StrategyAction.SAVE_COMMON, "torch", 1): CommonFileSave,
    (StrategyAction.LOAD_COMMON, "torch", 1): CommonFileLoad,
}


def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Any:
    """Return the default strategy.

    Args:
        action: what it does.
        backend: its format.
        version: of the format.

    Raises:
        CheckpointingException: none is registered.
    """
    found = _strategies.get((action, backend, version))
    if found is None:
        known = ", ".join(f"({name!r}, {number})" for one, name, number in _strategies if one is action)
        raise CheckpointingException(
            f"no strategy to {action.value} with backend ({backend!r}, {version}); registered: {known}"
        )
    return found() if callable(found) else found


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: Strategy) -> None:
    """Make a strategy the default.

    Args:
        action: what it does.
        backend: its format.
        version: of the format.
        strategy: the strategy.
    """
    _strategies[action, backend, version] = strategy
