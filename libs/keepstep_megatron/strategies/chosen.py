"""The strategies of one save or load: those that the caller chose, or the defaults of the checkpoint's format.

The defaults are registered by action, backend, and version.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep.checkpoint.places.directory import RECORD
from keepstep.checkpoint.places.location import InDirectory, parse
from keepstep_formats.dcp_metadata import METADATA
from keepstep_megatron.core import CONFIG_FNAME, CheckpointingConfig, CheckpointingException, load_config, save_config
from keepstep_megatron.strategies.common_file import COMMON_STATE_FNAME, CommonFileLoad, CommonFileSave
from keepstep_megatron.strategies.interfaces import (
    CheckpointDir,
    LoadCommonStrategy,
    LoadShardedStrategy,
    LoadStrategyBase,
    SaveCommonStrategy,
    SaveShardedStrategy,
    SaveStrategyBase,
    StrategyAction,
)
from keepstep_megatron.strategies.native import BACKEND, NativeLoad, NativeLoadStrategy, NativeSaveStrategy
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
            f"Cannot find a default strategy for: ({action.value!r}, {backend!r}, {version}); registered: {known}"
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


_default_save = [(BACKEND, 1)]


def set_default_backend(backend: str, version: int = 1) -> None:
    """Choose the format of saves to a directory that name none.

    Args:
        backend: ``"keepstep"``, which is the default, or ``"torch_dist"``, which Megatron Core writes.
        version: of the format.

    Raises:
        CheckpointingException: no strategy saves it.
    """
    get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)
    _default_save[0] = (backend, version)


def default_backend() -> tuple[str, int]:
    """Return the format of saves to a directory that name none."""
    return _default_save[0]


@dataclass(frozen=True)
class SaveStrategies:
    """The strategies of a save."""

    sharded: SaveShardedStrategy
    common: SaveCommonStrategy | None
    """None: ``sharded`` saves the values without sharding."""

    def write_config(self, checkpoint_dir: CheckpointDir) -> None:
        """Mark the checkpoint as complete. At a relay, it is marked already."""
        location = parse(checkpoint_dir)
        if isinstance(location, InDirectory):
            common = self.common or self.sharded
            backends = (self.sharded.backend, self.sharded.version, common.backend, common.version)
            save_config(CheckpointingConfig(*backends), location.path)


@dataclass(frozen=True)
class LoadStrategies:
    """The strategies of a load."""

    sharded: LoadShardedStrategy
    common: LoadCommonStrategy

    def opening_once(self, opened: ExitStack) -> LoadStrategies:
        """Return the strategies of one load, until ``opened`` is closed: keepstep's own read each manifest once."""
        sharded: object = self.sharded
        if type(sharded) is not NativeLoadStrategy or type(self.common) is not NativeLoadStrategy:
            return self
        native = NativeLoad(sharded, opened)
        return LoadStrategies(native, native)


def save_strategies(
    checkpoint_dir: CheckpointDir, sharded: SaveShardedStrategy | tuple[str, int] | None, common: Any
) -> SaveStrategies:
    """Return the strategies of a save. Raises ``CheckpointingException`` if one is not registered."""
    default = default_backend()
    if default[0] != BACKEND and sharded is None and not isinstance(parse(checkpoint_dir), InDirectory):
        default = BACKEND, 1
    saver: SaveShardedStrategy = _chosen(StrategyAction.SAVE_SHARDED, sharded, default, SaveShardedStrategy)
    if saver.can_handle_common_state:
        if common is not None:
            raise CheckpointingException(f"{saver} saves the values without sharding too: leave common_strategy out")
        return SaveStrategies(saver, None)
    return SaveStrategies(saver, _chosen(StrategyAction.SAVE_COMMON, common, ("torch", 1), SaveCommonStrategy))


def load_strategies(
    checkpoint_dir: CheckpointDir,
    sharded: LoadShardedStrategy | tuple[str, int] | None = None,
    common: LoadCommonStrategy | tuple[str, int] | None = None,
) -> LoadStrategies:
    """Return the strategies that load a checkpoint.

    Raises:
        CheckpointingException: the checkpoint does not exist or is not complete, or a strategy cannot load it.
    """
    config = config_of(checkpoint_dir)
    of_sharded = (config.sharded_backend, config.sharded_backend_version)
    of_common = (config.common_backend, config.common_backend_version)
    loader = _chosen(StrategyAction.LOAD_SHARDED, sharded, of_sharded, LoadShardedStrategy)
    common_loader = _chosen(StrategyAction.LOAD_COMMON, common, of_common, LoadCommonStrategy)
    for strategy, (backend, version) in ((loader, of_sharded), (common_loader, of_common)):
        strategy.check_backend_compatibility(backend)
        strategy.check_version_compatibility(version)
    return LoadStrategies(loader, common_loader)


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: CheckpointDir,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Return the strategies that load a checkpoint: that of sharded leaves, and that of the other values.

    Args:
        checkpoint_dir: see ``save``.
        sharded_strategy: see ``load``.
        common_strategy: see ``load``.

    Raises:
        CheckpointingException: the checkpoint does not exist or is not complete, or a strategy cannot load it.
    """
    found = load_strategies(checkpoint_dir, sharded_strategy, common_strategy)
    return found.sharded, found.common


def config_of(checkpoint_dir: CheckpointDir) -> CheckpointingConfig:
    """Return the backends of a checkpoint. Raises ``CheckpointingException`` if it is not complete."""
    location = parse(checkpoint_dir)
    native = CheckpointingConfig(BACKEND, 1, BACKEND, 1)
    if not isinstance(location, InDirectory):
        return native
    is_native = (location.path / RECORD).exists() and not (location.path / CONFIG_FNAME).exists()
    return native if is_native else load_config(location.path)


def check_vacant(path: Path) -> None:
    """Raise ``CheckpointingException`` if a directory has a complete checkpoint."""
    if (path / CONFIG_FNAME).exists() or (path / RECORD).exists():
        raise CheckpointingException(
            f"{path} has a complete checkpoint, which is never overwritten: save to another directory"
        )
    if (path / METADATA).exists() and not (path / COMMON_STATE_FNAME).exists():
        raise CheckpointingException(
            f"{path} has a checkpoint of torch.distributed.checkpoint, which is never overwritten: save to another "
            f"directory"
        )


def _chosen(action: StrategyAction, chosen: Any, default: tuple[str, int], kind: type[Any]) -> Any:
    if isinstance(chosen, kind):
        return chosen
    if chosen is not None and not isinstance(chosen, tuple):
        raise CheckpointingException(
            f"invalid strategy {chosen!r} to {action.value}: expected a {kind.__name__} or (backend, version)"
        )
    return get_default_strategy(action, *(default if chosen is None else chosen))
