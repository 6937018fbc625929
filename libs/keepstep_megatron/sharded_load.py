"""Load of a sharded state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_outplace, extract_matching_values, merge, nested_values
from keepstep_megatron.mapping import (
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
    apply_factory_merges,
)
from keepstep_megatron.stages import TIMEOUT, Ranks
from keepstep_megatron.state_parts import RequestedParts, is_empty_range, parts_to_load
from keepstep_megatron.strategies.chosen import LoadStrategies, load_strategies
from keepstep_megatron.strategies.interfaces import (
    CheckpointDir,
    LoadCommonStrategy,
    LoadShardedStrategy,
    ShardedMetadata,
)
from keepstep_megatron.validation import (
    StrictHandling,
    check_integrity,
    compare_keys,
    described,
    pack_rows,
    parse_strict_flag,
    row_of,
    unpack_rows,
)
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.text import listed

MAX_NAMED = 5

Loaded: TypeAlias = StateDict | tuple[StateDict, set[str], set[str]]

log = get_logger("keepstep.sharded")


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: CheckpointDir,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
) -> Loaded:
    """Load a sharded state. Every rank calls it, with the parts that it wants, however they were saved.

    Tensors are loaded into ``data`` of their leaf and converted to its dtype; or into new ones, if it is None. After an
    error, they may be half loaded.

    Args:
        sharded_state_dict: nested dicts and lists; only the memory of its tensors is changed.
        checkpoint_dir: see ``save``.
        sharded_strategy: a strategy, or ``(backend, version)``. Default: that of the checkpoint.
        common_strategy: the same for the values without sharding.
        validate_access_integrity: check that the ranks request each element of each value as main replica exactly once.
            False: the ranks do not speak to each other, unless ``strict`` needs the keys of all ranks.
        strict: what to do about keys that only the checkpoint or only the state has.

    Returns:
        The state: all values without sharding, loaded leaves in the structure of ``sharded_state_dict``, and values of
        ``LocalNonpersistentObject``. With ``StrictHandling.RETURN_*``: the state, missing keys, and unexpected keys.

    Raises:
        CheckpointingException: the checkpoint is not complete, a key is missing or has another shape, stored bytes are
            damaged, or a rank failed or was lost.
    """
    timeout = sharded_strategy.timeout if isinstance(sharded_strategy, LoadShardedStrategy) else TIMEOUT
    with ExitStack() as opened:

        def chosen() -> LoadStrategies:
            return load_strategies(checkpoint_dir, sharded_strategy, common_strategy).opening_once(opened)

        found = load_from(chosen, sharded_state_dict, checkpoint_dir, validate_access_integrity, strict, timeout)
    return found if StrictHandling.requires_returning_mismatch_keys(parse_strict_flag(strict)) else found[0]


def load_from(
    chosen: Callable[[], LoadStrategies],
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: CheckpointDir,
    validate_access_integrity: bool,
    strict: str | StrictHandling,
    timeout: timedelta,
    *,
    is_local: bool = False,
) -> tuple[StateDict, set[str], set[str]]:
    """Return the state, missing keys, and unexpected keys. See ``load``.

    Args:
        chosen: returns the strategies. Its error is one of the load.
        sharded_state_dict: see ``load``.
        checkpoint_dir: passed to the strategies, and named in errors.
        validate_access_integrity: see ``load``.
        strict: see ``load``.
        timeout: time limit of the load.
        is_local: the checkpoint has only keys of this rank. A requested key that it does not have is an error, whatever
            ``strict`` says: it is loaded with the sharding that it was made with.
    """
    has_all = validate_access_integrity or _needs_all_ranks(strict)
    ranks = Ranks(f"{checkpoint_dir} was not loaded", timeout, alone=not has_all)
    handling: StrictHandling
    strategies: LoadStrategies
    parts: RequestedParts
    state: StateDict = {}
    stored = frozenset[str]()

    def prepare() -> bytes:
        nonlocal handling, strategies, parts, state, stored
        handling = parse_strict_flag(strict)
        strategies = chosen()
        state = strategies.common.load_common(checkpoint_dir)
        parts = parts_to_load(sharded_state_dict)
        merge(state, parts.nonpersistent)
        if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
            stored = frozenset(leaf.key for leaf in stored_leaves(strategies, checkpoint_dir).values())
        return pack_rows(row_of(leaf) for leaf in _with_elements(parts.sharded))

    rows = [unpack_rows(one) for one in ranks.stage(prepare)]
    if validate_access_integrity:
        check_integrity(rows)
    requested = [leaf.key for leaf in _with_elements(parts.sharded)]
    requested_by_all = {row.key for of_rank in rows for row in of_rank}
    if is_local:
        requested_by_all = (requested_by_all & stored) | set(requested)
    keys = compare_keys(handling, stored, requested, requested_by_all)
    if keys.warning:
        log.warning("checkpoint and requested state differ", checkpoint=str(checkpoint_dir), reason=keys.warning)

    def read() -> None:
        nonlocal state
        if problem := keys.error or (described(frozenset(), keys.unexpected) if is_local else ""):
            raise CheckpointingException(problem)
        unexpected, sharded = extract_matching_values(parts.sharded, lambda leaf: leaf.key in keys.unexpected)
        factories = parts.factories
        if unexpected:
            _, left = extract_matching_values(parts.sharded, lambda leaf: leaf.key in keys.unexpected, True)
            factories = _without(factories, parts.sharded, left)
        merge(state, _loaded(strategies, sharded, checkpoint_dir))
        state = apply_factory_merges(state, factories)

    ranks.stage(read)
    return state, set(keys.missing), set(keys.unexpected)


def _needs_all_ranks(strict: str | StrictHandling) -> bool:
    try:
        return StrictHandling.requires_global_app_metadata(parse_strict_flag(strict))
    except ValueError:
        return False


def stored_leaves(strategies: LoadStrategies, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
    """Return the tensors and objects of a checkpoint, without data."""
    found = strategies.sharded.load_sharded_metadata(checkpoint_dir)
    if not strategies.sharded.can_handle_sharded_objects:
        found = {**found, **strategies.common.load_sharded_metadata(checkpoint_dir)}
    return found


def _with_elements(sharded: ShardedStateDict) -> list[Any]:
    """Return the leaves that have something to load: all but empty flattened ranges."""
    return [leaf for leaf in nested_values(sharded) if not is_empty_range(leaf)]


def _loaded(strategies: LoadStrategies, sharded: ShardedStateDict, checkpoint_dir: CheckpointDir) -> StateDict:
    """Return the structure of ``sharded`` with loaded values. Strategies get it without empty ranges."""
    rest, _ = extract_matching_values(sharded, lambda leaf: not is_empty_range(leaf))
    values: dict[int, Any] = {}
    if not strategies.sharded.can_handle_sharded_objects:
        objects, rest = extract_matching_values(rest, lambda leaf: isinstance(leaf, ShardedObject))
        asked = dict_list_map_outplace(lambda leaf: leaf, objects)  # a strategy may load in place
        _assign(values, objects, strategies.common.load_sharded_objects(asked, checkpoint_dir) if objects else {})
    asked = dict_list_map_outplace(lambda leaf: leaf, rest)
    _assign(values, rest, strategies.sharded.load(asked, checkpoint_dir))

    def value(leaf: Any) -> Any:
        if not is_empty_range(leaf):
            return values[id(leaf)]
        return torch.empty(0, dtype=leaf.dtype) if leaf.data is None else leaf.data.detach()

    state: StateDict = dict_list_map_outplace(value, sharded)
    return state


def _assign(values: dict[int, Any], leaves: Any, loaded: Any) -> None:
    """Note the loaded value of each leaf, by its identity."""
    for place, leaf in leaves.items() if isinstance(leaves, dict) else enumerate(leaves):
        try:
            value = loaded[place]
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointingException(
                f"the strategy returned no value for {getattr(leaf, 'key', place)!r}: it must return the "
                f"structure that it was given"
            ) from error
        if isinstance(leaf, dict | list):
            _assign(values, leaf, value)
        else:
            values[id(leaf)] = value


def _without(factories: Any, requested: Any, left: Any) -> Any:
    """Return the factories whose place is left, with the positions that lists have without the other places.

    Raises:
        CheckpointingException: only some leaves of a factory are left, which it cannot merge.
    """
    if isinstance(factories, ShardedTensorFactory):
        absent = {leaf.key for leaf in nested_values([requested])} - {leaf.key for leaf in nested_values([left])}
        if absent:
            raise CheckpointingException(
                f"ShardedTensorFactory {factories.key!r} cannot be merged: the checkpoint has some of its keys, but "
                f"not {listed(sorted(absent), MAX_NAMED)}: request those that it has without the factory"
            )
        return factories
    if not isinstance(factories, dict) or not isinstance(requested, dict | list):
        return factories
    places = {place: number if isinstance(requested, list) else place for number, place in enumerate(left)}
    return {
        places[place]: _without(part, requested[place], left[place])
        for place, part in factories.items()
        if place in places
    }
