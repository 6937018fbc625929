"""The contract of everything that moves live state from a healthy replica group to one that heals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Generic, TypeVar

T = TypeVar("T")

Progress = Callable[[int, int], None]
"""Called with (bytes received so far, bytes in all) during a transfer; from any thread, never from two at once."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Who has and who needs the live state in one step; the same in all groups but for ``replica_id`` and ``rank``."""

    job: str
    epoch: int
    quorum_id: int
    step: int
    replica_id: str
    rank: int
    world_size: int
    """Ranks of each group."""
    sources: tuple[str, ...]
    """replica_ids of all groups that have it."""
    joiners: tuple[str, ...]
    """replica_ids of all groups that heal."""
    beside: tuple[str, ...] = ()
    """replica_ids of the groups that heal from the same source as ``replica_id``, and that itself; empty: unknown."""
    together: bool = False
    """Whether everybody waits until all have healed."""


class CheckpointTransport(ABC, Generic[T]):
    """Rank i of the healthy group sends, rank i of the healing group receives."""

    accepts_into: ClassVar[bool] = False
    """Whether ``recv_checkpoint`` accepts ``into``, ``progress`` and ``limit``; False: torchft's parameters only."""

    @property
    def needs_all_sources(self) -> bool:
        """Whether every group that has the state is to send, not only the one that a joiner heals from."""
        return False

    def prepare(self, exchange: Exchange) -> None:
        """Comes before ``send_checkpoint`` and ``recv_checkpoint`` of a step."""

    @abstractmethod
    def metadata(self) -> str:
        """What another group passes to ``recv_checkpoint`` to fetch from this one."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Takes a snapshot of ``state_dict`` on the calling thread and serves it as the state of ``step``.

        Returns when the snapshot is taken: the state may change at once. Readers are served in the background and never
        waited for; one that makes no progress for ``timeout`` is cut off. Who calls it calls ``refuse_checkpoint`` when
        it raises.
        """

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str) -> None:
        """There is no snapshot of ``step``, and none will come: whoever asks for it is told why, at once."""

    @abstractmethod
    def recv_checkpoint(
        self,
        src_rank: int,
        metadata: str,
        step: int,
        timeout: timedelta,
        *,
        into: T | None = None,
        progress: Progress | None = None,
        limit: timedelta | None = None,
    ) -> T:
        """The state of exactly ``step`` from the transport that ``metadata`` names.

        ``into``: a state of the same structure that nobody else uses meanwhile. Each of its tensors with the same path,
        dtype and shape is overwritten and stands in the result; everything else in the result is new and on the CPU.
        Only a new DTensor is on the device of its mesh, which must exist in this process and be the only one that fits.
        When this raises, tensors of ``into`` may be half written (``TransferError.torn``): the caller must not count
        them as valid until a later call succeeds, which overwrites all of them.
        ``timeout``: for all of it; with ``limit``: without progress, which waiting for one's turn at the source is too,
        and ``limit`` for all of it. Raises ``TimeoutError`` when it passes, ``TransferError`` with the reason
        otherwise.
        """

    def source_lost(self, reason: str) -> None:
        """The group that ``recv_checkpoint`` receives from is gone. From any thread."""
        self.abort_receive(reason)

    def abort_receive(self, reason: str) -> None:
        """Ends every ``recv_checkpoint`` in progress with ``TransferError``. From any thread."""

    def disallow_checkpoint(self) -> None:
        """No new reader gets the snapshot. Never waits: a reader in the middle of it finishes from its own copy."""

    def shutdown(self, wait: bool = True) -> None:
        """Ends all transfers and frees threads, ports and buffers. ``wait``: return when they are freed."""

    @property
    def via(self) -> str:
        """How the state of the last ``recv_checkpoint``, or of the one in progress, came: ``direct``, ``relay`` ..."""
        return ""
