"""Save of a sharded state."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

from keepstep.checkpoint.places.location import InDirectory, parse
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import extract_matching_values, nested_values
from keepstep_megatron.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from keepstep_megatron.replicas import (
    CommonValue,
    check_equal,
    check_equal_common,
    common_values,
    digests_of,
    log_common_difference,
)
from keepstep_megatron.stages import TIMEOUT, Ranks
from keepstep_megatron.state_parts import SavedParts, parts_to_save
from keepstep_megatron.strategies.async_requests import AsyncRequest
from keepstep_megatron.strategies.chosen import SaveStrategies, check_vacant, save_strategies
from keepstep_megatron.strategies.interfaces import (
    AsyncSaveShardedStrategy,
    CheckpointDir,
    SaveCommonStrategy,
    SaveShardedStrategy,
)
from keepstep_megatron.strategies.outcome import naming_outcome
from keepstep_megatron.strategies.stored_state import common_object
from keepstep_megatron.validation import check_integrity, pack_rows, row_of, unpack_rows

CONTENT_METADATA_KEY = "content_metadata"


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: CheckpointDir,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
    content_metadata: dict[str, Any] | None = None,
    *,
    check_replicas: bool = False,
) -> AsyncRequest | None:
    """Save a sharded state. Every rank calls it. The checkpoint becomes complete, or is not visible.

    The order: factories are applied, ``LocalNonpersistentObject`` are left out, sharded leaves are validated, rank 0
    saves the other values, each rank its main replicas, and rank 0 marks the checkpoint as complete.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.
        checkpoint_dir: directory that all ranks see; for keepstep's format also a place at a relay. It has no complete
            checkpoint.
        sharded_strategy: a strategy, or ``(backend, version)`` of a registered one: ``("keepstep", 1)`` or
            ``("torch_dist", 1)``. Default: keepstep's format; see ``set_default_backend``.
        common_strategy: saves the values without sharding, unless ``sharded_strategy`` does. Default: ``common.pt``.
        validate_access_integrity: check that each element of each value has exactly one main replica, and log values
            without sharding that differ from those of rank 0.
        async_sharded_save: copy the state, and return a request that saves the copy.
        preprocess_common_before_consistancy_check: returns what is compared of the values without sharding, such as
            without values that may differ. It does not change its argument.
        content_metadata: facts about the state, for ``load_content_metadata``.
        check_replicas: compare the data of replicas, and the values without sharding. Different ones are an error.

    Returns:
        The request, if ``async_sharded_save``; every rank passes it to its ``AsyncCallsQueue``. Otherwise None.

    Raises:
        CheckpointingException: the state is invalid, the checkpoint exists, or a rank failed or was lost.
    """
    timeout = sharded_strategy.timeout if isinstance(sharded_strategy, SaveShardedStrategy) else TIMEOUT
    ranks = Ranks(f"{checkpoint_dir} was not saved", timeout)
    one = _Save(checkpoint_dir, ranks)

    def prepare() -> bytes:
        strategies = one.strategies = save_strategies(checkpoint_dir, sharded_strategy, common_strategy)
        if async_sharded_save and not isinstance(strategies.sharded, AsyncSaveShardedStrategy):
            raise CheckpointingException(
                f"Cannot apply async_save to non-async strategy {strategies.sharded}: pass async_sharded_save=False"
            )
        one.prepare(parts_to_save(sharded_state_dict), content_metadata)
        preprocess = preprocess_common_before_consistancy_check
        common: Sequence[CommonValue] = ()
        leaves: Sequence[Any] = ()
        if validate_access_integrity or check_replicas:
            common = common_values(preprocess(one.parts.common) if preprocess is not None else one.parts.common)
            leaves = list(nested_values(one.parts.sharded))
        rows = pack_rows(row_of(leaf) for leaf in leaves)
        place = [os.fsencode(checkpoint_dir), os.fsencode(os.path.realpath(checkpoint_dir))]
        packed: bytes = msgpack.packb([place, rows, digests_of(leaves) if check_replicas else {}, common])
        return packed

    found = [msgpack.unpackb(one, strict_map_key=False) for one in ranks.stage(prepare)]
    _check_same_place([place for place, *_ in found])
    rows = [unpack_rows(packed) for _, packed, _, _ in found]
    if validate_access_integrity:
        check_integrity(rows)
    common = [one for *_, one in found]
    if check_replicas:
        check_equal(rows, [digests for *_, digests, _ in found])
        check_equal_common(common)
    log_common_difference(common, ranks.rank)
    return one.begin(in_background=async_sharded_save)


class _Save:
    """The save of one rank, after the state was validated."""

    strategies: SaveStrategies
    parts: SavedParts

    def __init__(self, checkpoint_dir: CheckpointDir, ranks: Ranks) -> None:
        self._dir = checkpoint_dir
        self._ranks = ranks

    def prepare(self, parts: SavedParts, content_metadata: dict[str, Any] | None) -> None:
        """Take the parts to save. Rank 0 prepares the place."""
        common = parts.common
        if content_metadata is not None:
            common = {**common, CONTENT_METADATA_KEY: content_metadata}
        self.parts = SavedParts(parts.sharded, common)
        if self._ranks.rank == 0:
            location = parse(self._dir)
            if isinstance(location, InDirectory):
                check_vacant(location.path)
            self.strategies.sharded.prepare(self._dir)

    def begin(self, *, in_background: bool) -> AsyncRequest | None:
        """Save now, or return the request that does."""
        request: AsyncRequest | None = None

        def write() -> None:
            nonlocal request
            sharded = self._all_sharded()
            strategy = self.strategies.sharded
            if in_background:
                assert isinstance(strategy, AsyncSaveShardedStrategy)
                request = strategy.async_save(sharded, self._dir)
            else:
                strategy.save(sharded, self._dir)

        with naming_outcome(self._dir):
            self._ranks.stage(write)
        if request is None:
            self._complete()
            return None
        request.add_finalize_fn(self._complete)
        return request

    def _all_sharded(self) -> ShardedStateDict:
        """Return the sharded leaves, with the other values as one of them if the strategy saves these too."""
        common, strategy = self.strategies.common, self.strategies.sharded
        if common is None:
            whole = common_object(self.parts.common, replica_id=self._ranks.rank)
            for leaf in nested_values(self.parts.sharded):
                if isinstance(leaf, ShardedObject) and leaf.unique_key == whole.unique_key:
                    raise CheckpointingException(
                        f"ShardedObject {leaf.key!r} has the key of the values without sharding: rename it"
                    )
            return {"sharded": self.parts.sharded, "common": whole}
        common.save_common(self.parts.common, self._dir)
        if strategy.can_handle_sharded_objects:
            return self.parts.sharded
        objects, tensors = extract_matching_values(self.parts.sharded, lambda leaf: isinstance(leaf, ShardedObject))
        common.save_sharded_objects(objects, self._dir)
        rest: ShardedStateDict = tensors
        return rest

    def _complete(self) -> None:
        """Mark the checkpoint as complete."""

        def mark() -> None:
            if self._ranks.rank == 0:
                self.strategies.write_config(self._dir)

        with naming_outcome(self._dir):
            self._ranks.stage(mark)


def _check_same_place(places: Sequence[Sequence[bytes]]) -> None:
    """Raise if two ranks save to different places: as they were passed, and as real paths."""
    for rank, place in enumerate(places):
        if not set(place) & set(places[0]):
            first, other = (os.fsdecode(one[0]) for one in (places[0], place))
            raise CheckpointingException(
                f"rank 0 saves to {first!r}, but rank {rank} to {other!r}: pass the same place on all ranks"
            )
