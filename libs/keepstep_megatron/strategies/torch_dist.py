"""The ``torch_dist`` format: a directory of torch.distributed.checkpoint, as Megatron Core writes and reads it.

* ``common.pt``: the part of the state without sharded leaves.
* ``__RANK_NUMBER.distcp``: tensors and objects, each as torch.save writes it.
* ``.metadata``: which bytes of which file each part of a tensor is.
* ``metadata.json``: written last.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

from keepstep.checkpoint.places.durable_files import write_whole
from keepstep_formats.dcp_metadata import METADATA
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedStateDict
from keepstep_megatron.stages import TIMEOUT, Ranks
from keepstep_megatron.strategies.async_requests import AsyncRequest
from keepstep_megatron.strategies.directory_loading import DirectoryLoadStrategy, directory_of
from keepstep_megatron.strategies.distcp_files import (
    Item,
    Written,
    items_of,
    merged,
    pack_written,
    remove_files,
    write_items,
)
from keepstep_megatron.strategies.interfaces import AsyncSaveShardedStrategy, CheckpointDir
from keepstep_megatron.strategies.stored_dist import TorchDistState
from keepstep_megatron.strategies.stored_state import StoredState

BACKEND = "torch_dist"


class TorchDistSaveShardedStrategy(AsyncSaveShardedStrategy):
    """Saves a directory that Megatron Core 0.16 and plain ``dcp.load`` read.

    Args:
        backend: name of the format.
        version: of the format.
        keep_only_main_replica: must be True: other replicas are never written.
        thread_count: files that each rank writes at a time.
        cached_metadata: no effect. Megatron Core then keeps its plan for later saves; the ranks of keepstep exchange no
            plan.
        separation_hint: values whose keys begin with it are written to files of their own, whose names begin with it.
        timeout: time limit of a save.
        allow_pickle: save objects of other classes too, which only a load with ``allow_pickle`` reads.

    Raises:
        CheckpointingException: an argument has another value than the one that is possible.
    """

    def __init__(
        self,
        backend: str = BACKEND,
        version: int = 1,
        keep_only_main_replica: bool = True,
        thread_count: int = 2,
        cached_metadata: bool = False,  # noqa: ARG002  a parameter of Megatron Core
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
        self._allow_pickle = allow_pickle
        self._thread_count = thread_count
        self._separation_hint = separation_hint

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
        files = partial(write_items, files=self._thread_count, separation_hint=self._separation_hint)
        one = _OneSave(directory_of(checkpoint_dir), items, files, self.timeout)
        what = f"{checkpoint_dir} was not saved"
        return AsyncRequest(one.write, (), [one.finalize], timeout=self.timeout, what=what)


class _OneSave:
    """The save of one rank."""

    def __init__(
        self, path: Path, items: list[Item], write: Callable[[Path, int, list[Item]], list[Written]], timeout: timedelta
    ) -> None:
        self._path = path
        self._items = items
        self._write = write
        self._ranks = Ranks(f"{path} was not saved", timeout)
        self._written = b""
        self._problem: BaseException | None = None

    def write(self) -> None:
        """Write the files of this rank. Speaks to no other rank."""
        try:
            self._written = pack_written(self._write(self._path, self._ranks.rank, self._items))
        except BaseException as error:  # noqa: BLE001  finalize raises it
            self._problem = error
        self._items = []

    def finalize(self) -> None:
        """Write ``.metadata`` if all ranks have written their files. Otherwise, raise on all of them."""
        written = self._ranks.stage(self._result)
        self._ranks.stage(lambda: self._write_metadata(written))

    def _result(self) -> bytes:
        if self._problem is not None:
            raise self._problem
        return self._written

    def _write_metadata(self, written: list[bytes]) -> None:
        if self._ranks.rank == 0:
            from keepstep_formats.dcp_writing import dcp_metadata_file  # noqa: PLC0415  slow import

            write_whole(self._path / METADATA, dcp_metadata_file(self._path, merged(written)))


class TorchDistLoadShardedStrategy(DirectoryLoadStrategy):
    """Loads a directory of Megatron Core 0.7 to 0.19, or of ``TorchDistSaveShardedStrategy``.

    A directory of plain ``dcp.save`` has no ``metadata.json``; ``keepstep checkpoint import`` reads it.

    Args:
        allow_pickle: run the code that objects name. Only for a checkpoint of one's own.
    """

    def state_of(self, directory: Path, *, allow_pickle: bool) -> StoredState:
        """See ``DirectoryLoadStrategy``."""
        return TorchDistState(directory, allow_pickle=allow_pickle)
