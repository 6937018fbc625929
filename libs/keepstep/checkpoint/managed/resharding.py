"""Load a durable checkpoint of groups with another number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from keepstep.checkpoint.loading import load_leaves, reader_at_relay
from keepstep.checkpoint.stored import StoredCheckpoint
from keepstep.connection.deadline import Deadline
from keepstep.relay_client.relay_paths import AtRelay
from keepstep.state.errors import CheckpointDamaged, StateMismatch
from keepstep.state.flattening import Leaf, build, flatten
from keepstep.state.values.sharding import is_dtensor, new_like
from keepstep_mesh.config.logging import get_logger

log = get_logger("keepstep.durable")


def load_resharded(location: AtRelay, into: Mapping[str, Any], *, seconds: float, token: str | None) -> Any:
    """Load this rank's part of a checkpoint that was saved from other ranks.

    Tensors of ``into`` are loaded in place; a DTensor gets its shard. Values that ``into`` does not have, such as the
    state of an optimizer before its first step, are new: a DTensor is sharded as the one of equal shape in ``into``.
    A relay that fails is replaced by another one. If a chunk of it is damaged, the load begins again without it.

    Args:
        location: the checkpoint, with all relays that have it.
        into: state of the same structure.
        seconds: time without progress after which this fails.
        token: for the relays.

    Returns:
        The state.

    Raises:
        StateMismatch: the checkpoint does not have a value of ``into``, or the sharding of a new DTensor is unknown.
        CheckpointError: the checkpoint cannot be read, or a tensor has another shape in it.
    """
    try:
        return _load_resharded(location, into, seconds, token)
    except CheckpointDamaged as error:
        if not location.others:
            raise
        log.warning("checkpoint damaged at a relay; loading it from another", reason=str(error))
        another = replace(location, address=location.others[0], others=location.others[1:])
        return load_resharded(another, into, seconds=seconds, token=token)


def _load_resharded(location: AtRelay, into: Mapping[str, Any], seconds: float, token: str | None) -> Any:
    deadline = Deadline(seconds, f"{location} was not loaded", float("inf"))
    reader = reader_at_relay(location, deadline, token)
    try:
        stored = StoredCheckpoint(reader)
        here = {key: leaf for key, leaf in flatten(into).items() if not _is_empty(leaf.value)}
        keys = stored.keys()
        if missing := sorted(here.keys() - set(keys)):
            raise StateMismatch(f"{location} does not have {missing[:10]}, which this group has registered")
        models = [leaf for leaf in here.values() if is_dtensor(leaf.value)]
        leaves = {key: here.get(key) or Leaf(stored.paths[key], _new(key, stored, models)) for key in keys}
        state = build(leaves)
        load_leaves(state, stored, strict=True)
    finally:
        reader.close()
    return state


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _new(key: str, stored: StoredCheckpoint, models: Sequence[Leaf]) -> Any:
    """Return memory for a tensor that this group does not have, and another value as it is stored.

    An optimizer's state is sharded as its parameter: the one of equal shape whose name its path has, or else any.
    """
    tensor = stored.tensors.get(key)
    if tensor is None:
        return stored.value(key)  # a list is then seen as it was saved
    if all(shard.entry.sharding is None for shard in tensor.shards):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    alike = [leaf for leaf in models if tuple(leaf.value.shape) == tensor.shape]
    named = [leaf for leaf in alike if leaf.path[-1] in stored.paths[key]]
    if not alike:
        raise StateMismatch(
            f"{key} is sharded, and this group has no DTensor of shape {tuple(tensor.shape)} whose sharding it could "
            f"have; register a state that has {key} before the first step"
        )
    like = (named or alike)[0].value
    return new_like(like, dtype=tensor.dtype)
