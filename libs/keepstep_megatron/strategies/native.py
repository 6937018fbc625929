"""Keepstep's own format, in a directory or at a relay. docs/checkpoint-format.md describes it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any

from keepstep.checkpoint.loading import naming_key, open_reader, read_pieces
from keepstep.checkpoint.places.target import CheckpointTarget
from keepstep.checkpoint.saving import Kind, open_target, pack_of, save_facts
from keepstep.checkpoint.stored import StoredCheckpoint
from keepstep.checkpoint.stored import pieces_of as stored_pieces
from keepstep.state.flattening import Leaf, build
from keepstep.state.local_parts import ObjectPart, Part, TensorPart
from keepstep.state.staged_parts import StagedParts
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import nested_values
from keepstep_megatron.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict, is_main_replica
from keepstep_megatron.pieces import pieces_of
from keepstep_megatron.stages import TIMEOUT, Ranks
from keepstep_megatron.strategies.async_requests import AsyncRequest
from keepstep_megatron.strategies.interfaces import (
    AsyncSaveShardedStrategy,
    CheckpointDir,
    LoadCommonStrategy,
)
from keepstep_megatron.strategies.outcome import naming_outcome
from keepstep_megatron.strategies.stored_state import (
    COMMON_STATE_KEY,
    Destination,
    StoredLoadStrategy,
    StoredTensorFacts,
    is_unique_key,
)

BACKEND = "keepstep"


class NativeSaveStrategy(AsyncSaveShardedStrategy):
    """Saves in keepstep's format.

    Args:
        backend: name of the format.
        version: of the format.
        step: step of the training, for lists of checkpoints.
        kind: see ``keepstep.checkpoint.save``.
        timeout: time limit of a save.
        token: token for the relay. Default: that of the environment.
    """

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = 1,
        *,
        step: int = 0,
        kind: Kind = "durable",
        timeout: timedelta = TIMEOUT,
        token: str | None = None,
    ) -> None:
        super().__init__(backend, version)
        self.timeout = timeout
        self._step = step
        self._kind = kind
        self._token = token

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    @property
    def can_handle_common_state(self) -> bool:
        """True."""
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveShardedStrategy``."""
        requests: list[AsyncRequest] = []
        ranks = Ranks(f"{checkpoint_dir} was not saved", self.timeout)
        # before any rank waits for the others' packs
        ranks.stage(lambda: requests.append(self._request(_parts(sharded_state_dict), checkpoint_dir, None)))
        requests[0].execute_sync()

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> AsyncRequest:
        """See ``AsyncSaveShardedStrategy``."""
        staged = StagedParts(_parts(sharded_state_dict))
        return self._request(staged.parts, checkpoint_dir, staged)

    def _request(
        self, parts: Mapping[str, Part], checkpoint_dir: CheckpointDir, staged: StagedParts | None
    ) -> AsyncRequest:
        facts = save_facts(None, None, self._step, self._kind)
        target = open_target(checkpoint_dir, facts, timeout=self.timeout, token=self._token)
        what = f"{checkpoint_dir} was not saved"
        one = _OneSave(checkpoint_dir, target, parts, facts.world_size, Ranks(what, self.timeout), staged)
        return AsyncRequest(one.write, (), [one.finalize], timeout=self.timeout, what=what, abort_fn=one.abort)


class _OneSave:
    """The save of one rank."""

    def __init__(
        self,
        checkpoint_dir: CheckpointDir,
        target: CheckpointTarget,
        parts: Mapping[str, Part],
        world_size: int,
        ranks: Ranks,
        staged: StagedParts | None,
    ) -> None:
        self._dir = checkpoint_dir
        self._target = target
        self._parts = parts
        self._world_size = world_size
        self._ranks = ranks
        self._staged = staged
        self._problem: BaseException | None = None

    def write(self) -> None:
        """Store the part of this rank. Speaks to other ranks only through the place of the checkpoint."""
        try:
            self._target.begin()
            if self._world_size > 1:
                self._target.exchange(b"")  # all ranks are in the same attempt
            self._target.store(pack_of(self._parts))
        except BaseException as error:  # noqa: BLE001  finalize raises it
            self._problem = error
            self._target.fail(f"{type(error).__name__}: {error}")

    def finalize(self) -> None:
        """Commit if all ranks have stored their parts. Otherwise, raise on all of them."""
        try:
            with naming_outcome(self._dir):
                self._commit()
        finally:
            self._release()

    def abort(self) -> None:
        """Give up. Speaks to no other rank."""
        try:
            self._target.fail("the save was aborted")
        finally:
            self._release()

    def _release(self) -> None:
        self._target.close()
        if self._staged is not None:
            self._staged.release()

    def _commit(self) -> None:
        try:
            self._ranks.stage(self._raise)
            self._ranks.stage(self._target.commit)
        except BaseException as error:
            if self._problem is None:
                self._target.fail(str(error))
            raise

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem


def _parts(sharded_state_dict: ShardedStateDict) -> dict[str, Part]:
    """Return what this rank writes."""
    found: dict[str, Part] = {}
    for leaf in nested_values(sharded_state_dict):
        if not is_main_replica(leaf.replica_id):
            continue
        if isinstance(leaf, ShardedObject):
            if leaf.unique_key in found:
                raise CheckpointingException(f"two values have the key {leaf.unique_key!r}: rename one of them")
            found[leaf.unique_key] = ObjectPart((leaf.unique_key,), leaf.data)
        elif isinstance(leaf, ShardedTensor):
            pieces = tuple((box, memory) for box, memory in pieces_of(leaf) if box.volume or 0 in leaf.global_shape)
            known = found.get(leaf.key)
            if isinstance(known, TensorPart):
                pieces = (*known.pieces, *pieces)
            found[leaf.key] = TensorPart((leaf.key,), leaf.dtype, leaf.global_shape, pieces, None, True)
    return found


class NativeLoadStrategy(StoredLoadStrategy, LoadCommonStrategy):
    """Loads keepstep's format: what ``NativeSaveStrategy`` or ``keepstep.checkpoint.save`` has written.

    Args:
        timeout: time limit of a load.
        token: token for the relay. Default: that of the environment.
    """

    def __init__(self, *, timeout: timedelta = TIMEOUT, token: str | None = None) -> None:
        self.timeout = timeout
        self._token = token

    @contextmanager
    def open(self, checkpoint_dir: CheckpointDir) -> Iterator[_NativeState]:
        """See ``StoredLoadStrategy``."""
        reader = open_reader(checkpoint_dir, timeout=self.timeout, token=self._token)
        try:
            yield _NativeState(StoredCheckpoint(reader))
        finally:
            reader.close()

    def load_common(self, checkpoint_dir: CheckpointDir) -> StateDict:
        """See ``LoadCommonStrategy``."""
        with self.open(checkpoint_dir) as stored:
            state = stored.common()
        if not isinstance(state, dict):
            raise CheckpointingException(f"{checkpoint_dir} has a common state that is no dict: {type(state).__name__}")
        return state


class NativeLoad(NativeLoadStrategy):
    """The strategy of one load: it opens a checkpoint once, until ``opened`` is closed."""

    def __init__(self, strategy: NativeLoadStrategy, opened: ExitStack) -> None:
        super().__init__(timeout=strategy.timeout, token=strategy._token)  # noqa: SLF001  of its base class
        self._opened = opened
        self._states: dict[str, _NativeState] = {}

    @contextmanager
    def open(self, checkpoint_dir: CheckpointDir) -> Iterator[_NativeState]:
        """See ``StoredLoadStrategy``."""
        place = os.fspath(checkpoint_dir)
        if place not in self._states:
            self._states[place] = self._opened.enter_context(super().open(checkpoint_dir))
        yield self._states[place]


class _NativeState:
    """See ``StoredState``."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        self._stored = stored

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensorFacts]:
        return {key: StoredTensorFacts(one.dtype, one.shape) for key, one in self._stored.tensors.items()}

    @property
    def objects(self) -> tuple[str, ...]:
        return tuple(self._stored.objects)

    def read(self, destinations: list[Destination]) -> None:
        found = []
        for one in destinations:
            for shard in self._stored.tensors[one.key].shards:
                overlap = shard.box.overlap(one.box)
                if overlap is not None:
                    memory = one.memory[overlap.within(one.box)]
                    found += [(one.key, piece, memory) for piece in stored_pieces(shard, overlap)]
        read_pieces(self._stored.reader, found)

    def common(self) -> Any:
        """Return the values without sharding. In a checkpoint of ``keepstep.checkpoint.save``: all but tensors."""
        if COMMON_STATE_KEY in self._stored.objects:
            return self.value(COMMON_STATE_KEY)
        plain = [key for key in self._stored.objects if not is_unique_key(key)]
        return build({key: Leaf(self._stored.paths[key], self.value(key)) for key in plain})

    def value(self, unique_key: str) -> Any:
        return naming_key(unique_key, lambda: self._stored.value(unique_key))
