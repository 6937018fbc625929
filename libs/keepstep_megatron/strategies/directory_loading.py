"""Loads of directories that other programs wrote."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep.checkpoint.places.location import InDirectory, parse
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.strategies.interfaces import CheckpointDir
from keepstep_megatron.strategies.stored_state import StoredLoadStrategy, StoredState
from keepstep_mesh.threads.starting import ThreadPoolExecutor

STREAMS = 4
"""Parts that one load reads at a time."""


def directory_of(checkpoint_dir: CheckpointDir) -> Path:
    """Return the path of a directory. Raises ``CheckpointingException`` for a relay."""
    location = parse(checkpoint_dir)
    if not isinstance(location, InDirectory):
        raise CheckpointingException(f"{location} is not a directory: only keepstep's format can be at a relay")
    return location.path


class DirectoryLoadStrategy(StoredLoadStrategy):
    """Loads from a directory that may have pickles.

    Args:
        allow_pickle: run the code that objects name. Only for a checkpoint of one's own.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle

    @abstractmethod
    def state_of(self, directory: Path, *, allow_pickle: bool) -> StoredState:
        """Return the checkpoint in a directory."""

    @contextmanager
    def open(self, checkpoint_dir: CheckpointDir) -> Iterator[StoredState]:
        """See ``StoredLoadStrategy``."""
        yield self.state_of(directory_of(checkpoint_dir), allow_pickle=self._allow_pickle)


def read_all(reads: Iterable[Callable[[], None]]) -> None:
    """Call all of ``reads``, on several threads. Raises the error of the first that fails."""
    with ThreadPoolExecutor(STREAMS, "keepstep-load") as pool:
        running = [pool.submit(one) for one in reads]
        try:
            for one_read in running:
                one_read.result()
        finally:
            pool.shutdown(cancel_futures=True)
