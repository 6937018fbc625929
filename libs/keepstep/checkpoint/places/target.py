"""Where one rank saves its part of a checkpoint, and what it learns from the other ranks there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from keepstep.state.pack import Pack


@dataclass(frozen=True)
class SaveFacts:
    """Common properties of the ranks of one save, and the rank of this process."""

    rank: int
    world_size: int
    step: int
    kind: str
    producer: str
    sync: bool = True
    """Whether the files of a directory are on disk when it is committed."""
    overwrite: bool = False
    """Whether the save replaces a committed checkpoint of that name."""


@dataclass(frozen=True)
class Exchanged:
    """The layouts of all ranks."""

    layouts: tuple[bytes, ...]
    """Different layouts."""
    of_rank: tuple[int, ...]
    """For each rank, the position of its layout."""


class CheckpointTarget(Protocol):
    """The methods are called in this order. A rank that fails after ``begin`` calls ``fail``."""

    def begin(self) -> None:
        """Begin the checkpoint, or join it. Raises ``CheckpointError`` if it is committed already."""

    def exchange(self, layout: bytes) -> Exchanged:
        """Report what this rank holds, and wait for the layouts of all ranks.

        Raises:
            CheckpointAborted: a rank failed, or was not there in time.
        """

    def store(self, pack: Pack) -> None:
        """Store the pack of this rank, and report it. The pack is used until the end of ``commit``.

        Raises:
            CheckpointAborted: a rank failed, or was not there in time.
        """

    def commit(self) -> None:
        """Wait until all ranks have stored their packs, and the checkpoint is committed.

        Raises:
            CheckpointAborted: a rank failed, or was not there in time.
        """

    def fail(self, error: str) -> None:
        """Tell the other ranks why this one failed. Never raises."""

    def close(self) -> None:
        """Release connections."""
