"""The ``torch_dist`` format: a directory of torch.distributed.checkpoint, as Megatron Core writes and reads it.

* ``common.pt``: the part of the state without sharded leaves.
* ``__RANK_NUMBER.distcp``: tensors and objects, each as torch.save writes it.
* ``.metadata``: which bytes of which file each part of a tensor is.
* ``metadata.json``: written last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path

from keepstep.checkpoint.places.durable_files import write_whole
from keepstep_formats.dcp_metadata import METADATA, read_dcp_metadata
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedStateDict, StateDict
from keepstep_megatron.stages import TIMEOUT, Ranks
from keepstep_megatron.strategies.async_requests import AsyncRequest
from keepstep_megatron.strategies.directory_loading import DirectoryLoadStrategy, directory_of
from keepstep_megatron.strategies.distcp_files import (
    Item,
    RankPlan,
    Written,
    has_known_parts,
    items_of,
    merged,
    plan_of,
    plans_of,
    remove_files,
    sizes_of_files,
    unpack_plan,
    without_prefix,
    write_items,
)
from keepstep_megatron.strategies.interfaces import AsyncSaveShardedStrategy, CheckpointDir
from keepstep_megatron.strategies.stored_dist import TorchDistState
from keepstep_megatron.strategies.stored_state import load_leaves
from keepstep_mesh.config.logging import get_logger

BACKEND = "torch_dist"
log = get_logger("keepstep.sharded")


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves a directory that Megatron Core 0.16 and plain ``dcp.load`` read.

    Args:
        backend: name of the format.
        version: of the format.
        keep_only_main_replica: must be True: other replicas are never written.
        thread_count: files that each rank writes at a time.
        cached_metadata: later saves of a state with the same parts send rank 0 only what has changed since the save
            before, or since the load whose ``cached_global_metadata`` was passed on. A state with other parts is saved
            too.
        separation_hint: values whose keys begin with it are written to files of their own, whose names begin with it.
        timeout: time limit of a save.
        allow_pickle: save objects of other classes too, which only a load with ``allow_pickle`` reads.

    Attributes:
        use_cached_ckpt_structure: see ``cached_metadata``.
        cached_global_metadata: what a save need not send again: that of a load, set by the caller, or at rank 0 that of
            the last two saves, if they had the same parts.
        validated_cache_reuse: whether the last save had the parts of the one before, on all ranks.
        validated_loaded_metadata_reuse: whether it had those of ``cached_global_metadata`` of a load.

    Raises:
        CheckpointingException: an argument has another value than the one that is possible.
    """

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,
        separation_hint: str | None = None,
        *,
        timeout: timedelta = TIMEOUT,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(backend, version)
        if not keep_only_main_replica:
            raise CheckpointingException(
                "keep_only_main_replica is False, but only main replicas are written: pass True"
            )
        if thread_count < 1:
            raise CheckpointingException(f"invalid thread_count {thread_count}: expected at least 1 file per rank")
        if separation_hint is not None and (thread_count < 2 or not separation_hint or "/" in separation_hint):
            raise CheckpointingException(
                f"invalid separation_hint {separation_hint!r} with thread_count {thread_count}: expected the beginning "
                f"of a file name without a slash, and at least 2 files per rank"
            )
        self.timeout = timeout
        self.keep_only_main_replica = keep_only_main_replica
        self.thread_count = thread_count
        self.separation_hint = separation_hint
        self.use_cached_ckpt_structure = cached_metadata
        self.cached_global_metadata: StoredPlans | None = None
        self.validated_cache_reuse = False
        self.validated_loaded_metadata_reuse = False
        self._allow_pickle = allow_pickle
        self._last = SavedPlans()

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def prepare(self, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveShardedStrategy``. Remove the files of a save that did not finish."""
        path = directory_of(checkpoint_dir)
        path.mkdir(parents=True, exist_ok=True)
        remove_files(path)

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveShardedStrategy``. A subclass that has an ``async_save`` of its own saves with it."""
        if type(self).async_save is not TorchDistSaveShardedStrategy.async_save:
            super().save(sharded_state_dict, checkpoint_dir)
        else:
            self._request(self._items(sharded_state_dict), checkpoint_dir).execute_sync()

    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> AsyncRequest:
        """See ``AsyncSaveShardedStrategy``."""
        return self._request([one.copied() for one in self._items(sharded_state_dict)], checkpoint_dir)

    def _items(self, sharded_state_dict: ShardedStateDict) -> list[Item]:
        return items_of(sharded_state_dict, allow_pickle=self._allow_pickle)

    def _request(self, items: list[Item], checkpoint_dir: CheckpointDir) -> AsyncRequest:
        files = partial(write_items, files=self.thread_count, separation_hint=self.separation_hint)
        one = _OneSave(self, directory_of(checkpoint_dir), items, files)
        what = f"{checkpoint_dir} was not saved"
        return AsyncRequest(one.write, (), [one.finalize], timeout=self.timeout, what=what)

    def known_plans(self, world_size: int) -> SavedPlans:
        """Return what this rank knows before a save of ``world_size`` ranks: the last save, or what was loaded."""
        if not self.use_cached_ckpt_structure:
            return SavedPlans()
        loaded = self.cached_global_metadata
        if self._last.plans or not isinstance(loaded, StoredPlans) or len(loaded.all_local_plans) > world_size:
            return self._last
        nothing = [plan_of(())] * (world_size - len(loaded.all_local_plans))
        return SavedPlans(dict(enumerate([*loaded.all_local_plans, *nothing])), is_loaded=True)

    def saved(self, known: SavedPlans, plans: SavedPlans, *, is_same: bool) -> None:
        """Keep the plans of a save.

        Args:
            known: before the save.
            plans: those of the save; ranks other than 0 have only their own.
            is_same: whether all ranks have written the parts that they knew.
        """
        if not self.use_cached_ckpt_structure:
            return
        self._last = plans
        self.validated_cache_reuse = is_same and not known.is_loaded
        self.validated_loaded_metadata_reuse = is_same and known.is_loaded
        if self.validated_cache_reuse and plans.metadata:
            self.cached_global_metadata = StoredPlans(partial(list, plans.plans.values()))


class StoredPlans:
    """The plans of the ranks of a checkpoint: ``cached_global_metadata``.

    Args:
        plans: returns the plans of the ranks.
    """

    def __init__(self, plans: Callable[[], list[RankPlan]]) -> None:
        self._plans = plans

    @cached_property
    def all_local_plans(self) -> list[RankPlan]:
        """The plans of the ranks."""
        return self._plans()


@dataclass(frozen=True)
class SavedPlans:
    """The plans of the last save that this rank knows."""

    plans: Mapping[int, RankPlan] = field(default_factory=dict)
    """By rank. Rank 0 has all of them, other ranks have theirs."""
    metadata: bytes = b""
    """The file ``.metadata``. Only rank 0 has it."""
    is_loaded: bool = False
    """It is that of a load."""


class _OneSave:
    """The save of one rank."""

    def __init__(
        self,
        strategy: TorchDistSaveShardedStrategy,
        path: Path,
        items: list[Item],
        write: Callable[[Path, int, list[Item]], list[Written]],
    ) -> None:
        self._strategy = strategy
        self._path = path
        self._items = items
        self._write = write
        self._ranks = Ranks(f"{path} was not saved", strategy.timeout)
        self._plan = RankPlan(b"", b"")
        self._problem: BaseException | None = None

    def write(self) -> None:
        """Write the files of this rank. Speaks to no other rank."""
        try:
            self._plan = plan_of(self._write(self._path, self._ranks.rank, self._items))
        except BaseException as error:  # noqa: BLE001  finalize raises it
            self._problem = error
        self._items = []

    def finalize(self) -> None:
        """Write ``.metadata`` if all ranks have written their files. Otherwise, raise on all of them."""
        known = self._strategy.known_plans(self._ranks.size)
        if not self._is_complete_with(known):
            self._is_complete_with(SavedPlans())

    def _is_complete_with(self, known: SavedPlans) -> bool:
        """Send what differs from ``known``, and write ``.metadata``. False: rank 0 knows other plans; send all then."""
        sent = self._ranks.stage(lambda: self._result(known))
        saved = SavedPlans({self._ranks.rank: self._plan})

        def write_metadata() -> bytes:
            nonlocal saved
            if self._ranks.rank == 0:
                plans = {rank: unpack_plan(one, known.plans.get(rank)) for rank, one in enumerate(sent)}
                found = {rank: one for rank, one in plans.items() if one is not None}
                if len(found) < len(sent):
                    return b"not known"
                saved = self._write_metadata(found, known)
            return b""

        if self._ranks.stage(write_metadata)[0]:
            return False
        self._strategy.saved(known, saved, is_same=all(map(has_known_parts, sent)))
        return True

    def _result(self, known: SavedPlans) -> bytes:
        if self._problem is not None:
            raise self._problem
        return self._plan.packed(known.plans.get(self._ranks.rank))

    def _write_metadata(self, plans: Mapping[int, RankPlan], known: SavedPlans) -> SavedPlans:
        from keepstep_formats.dcp_writing import dcp_metadata_file  # noqa: PLC0415  slow import

        metadata = known.metadata
        if not metadata or plans != known.plans:
            is_kept = self._strategy.use_cached_ckpt_structure
            metadata = dcp_metadata_file(None if is_kept else self._path, merged(plans.values()))
        write_whole(self._path / METADATA, metadata)
        return SavedPlans(plans, metadata)


class TorchDistLoadShardedStrategy(DirectoryLoadStrategy):
    """Loads a directory of Megatron Core 0.7 to 0.19, or of ``TorchDistSaveShardedStrategy``.

    A directory of plain ``dcp.save`` has no ``metadata.json``; ``keepstep checkpoint import`` reads it.

    Args:
        allow_pickle: run the code that objects name. Only for a checkpoint of one's own.

    Attributes:
        cached_global_metadata: what the ranks that saved the last checkpoint that was loaded have written, for
            ``TorchDistSaveShardedStrategy.cached_global_metadata``.
    """

    cached_global_metadata: StoredPlans | None = None

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> StateDict:
        """See ``LoadShardedStrategy``."""
        stored = self.state_of(directory_of(checkpoint_dir), allow_pickle=self._allow_pickle)
        state = load_leaves(sharded_state_dict, stored)
        self.cached_global_metadata = StoredPlans(partial(plans_of, stored.content))
        return state

    def state_of(self, directory: Path, *, allow_pickle: bool) -> TorchDistState:
        """See ``DirectoryLoadStrategy``."""
        return TorchDistState(directory, allow_pickle=allow_pickle)

    def remove_sharded_tensors(self, checkpoint_dir: CheckpointDir, key_prefix: str) -> None:
        """Remove values from ``.metadata``, and then the files that have no other values. One rank calls it.

        ``TorchDistSaveShardedStrategy(separation_hint=key_prefix)`` writes them to such files. If they are in files
        with other values, their bytes stay there.

        Args:
            checkpoint_dir: a directory.
            key_prefix: beginning of the keys of tensors and objects. If no key begins with it, nothing changes.

        Raises:
            CheckpointingException: ``key_prefix`` is empty.
            ForeignCheckpointError: ``.metadata`` is damaged.
        """
        from keepstep_formats.dcp_writing import dcp_metadata_file  # noqa: PLC0415  slow import

        if not key_prefix:
            raise CheckpointingException("key_prefix is empty, and would remove everything: pass a beginning of keys")
        path = directory_of(checkpoint_dir)
        content = read_dcp_metadata(path, allow_gaps=True)
        kept = without_prefix(content, key_prefix)
        if len(kept.paths) == len(content.paths):
            log.warning("no key begins with the prefix; nothing is removed", checkpoint=str(path), prefix=key_prefix)
            return
        before, after = sizes_of_files(content), sizes_of_files(kept)
        write_whole(path / METADATA, dcp_metadata_file(path, kept))
        for name in before.keys() - after.keys():
            (path / name).unlink(missing_ok=True)
        if left := sum(before[name] - size for name, size in after.items()):
            reason = "the files that hold them have other values too: save with separation_hint to separate them"
            log.warning("bytes of removed values stay", checkpoint=str(path), bytes=left, reason=reason)
