"""The interface of transports, which move live state from a healthy replica group to one that heals."""

from __future__ import annotations

from abc import ABC, abstractmethod
from datetime import timedelta
from typing import ClassVar, Generic, TypeVar

from keepstep.transfer.exchange import Exchange, Progress

T = TypeVar("T")


class CheckpointTransport(ABC, Generic[T]):
    """Moves live state from a healthy group to a group that heals: rank i sends to rank i."""

    accepts_into: ClassVar[bool] = False
    """Whether ``recv_checkpoint`` accepts ``into``, ``progress`` and ``limit``; False: torchft's parameters only."""
    receives_in_background: ClassVar[bool] = False
    """Whether ``recv_checkpoint`` works from another thread, while later steps go on."""

    @property
    def needs_all_sources(self) -> bool:
        """Whether every group that has the state must send it, not only the one that a joiner heals from."""
        return False

    def prepare(self, exchange: Exchange) -> None:
        """Announce the transfer of a step. Called before ``send_checkpoint`` and ``recv_checkpoint``.

        Args:
            exchange: step, sources, and joiners of the transfer.
        """

    @abstractmethod
    def metadata(self) -> str:
        """Return the value that another group passes to ``recv_checkpoint`` to receive from this one."""

    @abstractmethod
    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: T, timeout: timedelta) -> None:
        """Copy ``state_dict`` on the calling thread, and serve the copy as the state of ``step``.

        Returns when the copy is complete; the state may then change. Readers are served in the background, and the
        caller never waits for them. If this raises, the caller calls ``refuse_checkpoint``.

        Args:
            dst_ranks: replica ranks of the groups that heal from this one.
            step: the step of the state.
            state_dict: the state.
            timeout: a reader without progress for this long is disconnected.
        """

    def copy_early(self, step: int, state_dict: T) -> None:
        """Copy the state of ``step`` in the background, for a ``send_checkpoint`` of this step that follows soon.

        A transport without such a copy does nothing. May be called from any thread, and in vain.

        Args:
            step: the step of the state.
            state_dict: a state of the same tensors. Those that are written to until ``send_checkpoint`` are copied
                there again.
        """

    def refuse_checkpoint(self, dst_ranks: list[int], step: int, reason: str, *, lasting: bool = False) -> None:
        """Refuse the readers of a step at once, because no snapshot of it will follow.

        Args:
            dst_ranks: ranks of the joining groups in the quorum.
            step: of the snapshot that the readers ask for.
            reason: sent to them.
            lasting: a later request would be refused as well, so their error is ``StateMismatch``.
        """

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
        """Receive the state of exactly ``step``.

        Args:
            src_rank: replica rank of the source.
            metadata: ``metadata()`` of the source's transport.
            step: the step of the state.
            timeout: time limit; with ``limit``, the longest time without progress. Waiting in the queue of the source
                is progress.
            into: a state of the same structure, which no other code uses during the call. Each tensor with the same
                path, dtype and shape is overwritten and returned. All other tensors of the result are new and on the
                CPU; a new DTensor is on the device of its mesh, which must exist in this process and be the only one
                that fits. Default: all tensors are new.
            progress: called with the bytes received and the bytes in all. Default: not called.
            limit: time limit of the whole transfer. Default: ``timeout``.

        Returns:
            The state.

        Raises:
            TimeoutError: a time limit was exceeded.
            StateMismatch: the state does not fit ``into``, or the source can never send it.
            TransferError: the state was not received. If its ``torn`` is true, tensors of ``into`` may be half
                written, and are invalid until a later call succeeds, which overwrites all of them.
        """

    def keep_present(self) -> None:
        """Let the next ``recv_checkpoint`` fetch only the chunks that differ in ``into``, for a state that is there."""

    def source_lost(self, reason: str) -> None:
        """React to the loss of the group that ``recv_checkpoint`` receives from. Called from any thread.

        Args:
            reason: names the lost group.
        """
        self.abort_receive(reason)

    def abort_receive(self, reason: str) -> None:
        """End every ``recv_checkpoint`` in progress with ``TransferError``. Called from any thread.

        Args:
            reason: text of the error.
        """

    def disallow_checkpoint(self) -> None:
        """Serve no new reader. Never waits: a reader that has begun continues from its own snapshot."""

    def shutdown(self, wait: bool = True) -> None:
        """End all transfers and free threads, ports and buffers.

        Args:
            wait: return when they are freed.
        """

    @property
    def via(self) -> str:
        """The path of the current or last received state: ``direct``, ``relay`` ..."""
        return ""
