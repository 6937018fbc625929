"""Leaves that become several sharded leaves in a checkpoint, such as a fused weight that is stored in its parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias

import torch

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_inplace
from keepstep_megatron.mapping.sharded_base import ReplicaId, ShardedBase, ShardedStateDict, StateDict
from keepstep_mesh.text import listed

FactoryBuildFn: TypeAlias = Callable[..., Any]
"""``build_fn(key, data, replica_id)``, or ``build_fn(key, data, replica_id, flattened_range)``."""
FactoryMergeFn: TypeAlias = Callable[[Any], torch.Tensor]


@dataclass
class ShardedTensorFactory(ShardedBase):
    """A tensor that is saved as several sharded leaves, and put together again after a load.

    The state of an optimizer has the same shape as the parameter, so the factory of a parameter also fits its
    optimizer state: ``make_sharded_optimizer_tensor`` replaces ``key`` and ``data``.

    Args:
        key: prefix of the keys that ``build_fn`` makes.
        data: the tensor.
        build_fn: returns the state dict to save, from ``(key, data, replica_id)`` or ``(key, data, replica_id,
            flattened_range)``. Its sharded leaves may depend on these arguments only.
        merge_fn: returns one tensor from the state dict of ``build_fn`` with loaded values.
        replica_id: which copy of the tensor this rank has; see ``is_main_replica``.
        flattened_range: the part of the flattened tensor that ``data`` is; None: all of it.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Return the state dict of ``build_fn``.

        Raises:
            CheckpointingException: ``build_fn`` has no parameter for ``flattened_range``, which is set.
        """
        arguments = (self.key, self.data, self.replica_id)
        if _accepts_four(self.build_fn):
            return self.build_fn(*arguments, self.flattened_range)
        if self.flattened_range is not None:
            raise CheckpointingException(
                f"ShardedTensorFactory {self.key!r} has flattened_range {self.flattened_range}, but its build_fn has "
                f"three parameters: give it a fourth, flattened_range"
            )
        return self.build_fn(*arguments)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: ``build_fn`` decides on what fits."""

    def without_data(self) -> Self:
        """Return a copy with ``data=None``."""
        return replace(self, data=None)


def _accepts_four(build_fn: FactoryBuildFn) -> bool:
    try:
        inspect.signature(build_fn).bind(None, None, None, None)
    except TypeError:
        return False
    except ValueError:  # a callable of C without a signature
        return True
    return True


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace each ``ShardedTensorFactory`` by the state dict that it builds, in place.

    Args:
        sharded_state_dict: nested dicts and lists; changed.
    """
    dict_list_map_inplace(
        lambda leaf: leaf.build() if isinstance(leaf, ShardedTensorFactory) else leaf, sharded_state_dict
    )


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: tuple[str | int, ...] = ()) -> StateDict:
    """Merge loaded values where a factory was, in place.

    Args:
        x1: loaded values, in the structure after ``apply_factories``; changed.
        x2: the factories, in the structure before it. Its keys are a subset of those of ``x1``; a list may be a dict
            from positions to values.
        key: path of ``x1``, for errors.

    Returns:
        ``x1``; or, if ``x2`` is a factory, the merged tensor.

    Raises:
        ValueError: the structures of ``x1`` and ``x2`` do not fit.
    """
    loaded: Any = x1
    if isinstance(x2, ShardedTensorFactory):
        merged: Any = x2.merge_fn(loaded)
        return merged  # type: ignore[no-any-return]
    for place, part in _children(loaded, x2, key):
        loaded[place] = apply_factory_merges(loaded[place], part, (*key, place))
    return x1


def _children(loaded: Any, factories: Any, key: tuple[str | int, ...]) -> list[tuple[Any, Any]]:
    """Return the places of ``factories`` and their values. Raises ``ValueError`` if ``loaded`` has no such place."""
    if isinstance(loaded, dict) and isinstance(factories, dict):
        absent = [place for place in factories if place not in loaded]
        if absent:
            raise ValueError(
                f"loaded state has no key {absent[0]!r} at {key}; its keys: {listed(map(repr, loaded), 8)}"
            )
        return list(factories.items())
    if isinstance(loaded, list) and isinstance(factories, list):
        if len(loaded) != len(factories):
            raise ValueError(
                f"loaded state has a list of {len(loaded)} values at {key}, but the requested state has one of "
                f"{len(factories)}: expected equal lengths"
            )
        return list(enumerate(factories))
    if isinstance(loaded, list) and isinstance(factories, dict):
        for place in factories:
            if not isinstance(place, int) or not 0 <= place < len(loaded):
                raise ValueError(
                    f"invalid position {place!r} in a list of {len(loaded)} values at {key}: expected an integer from "
                    f"0 to {len(loaded) - 1}"
                )
        return list(factories.items())
    raise ValueError(
        f"cannot merge a {type(factories).__name__} into a {type(loaded).__name__} at {key}: expected dicts, lists, or "
        f"a factory"
    )
