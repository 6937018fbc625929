"""Base class of the process groups that communicate through one of torch's backends."""

from __future__ import annotations

from abc import abstractmethod
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Store, Work

from keepstep.process_group.base import DEFAULT_TIMEOUT, ProcessGroup
from keepstep.process_group.group_errors import ProcessGroupAbortedError, ProcessGroupError
from keepstep.process_group.store_exchange import create_store_client
from keepstep.process_group.torch_backends.backend_work import BackendWork, plain_message
from keepstep.process_group.torch_backends.communicator import Communicator
from keepstep.process_group.works import JointWork
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError

log = get_logger("keepstep.process_group")

_SINGLE = {
    "allgather_into_tensor_coalesced": "_allgather_base",
    "reduce_scatter_tensor_coalesced": "_reduce_scatter_base",
}
"""Collectives that run as one backend call per tensor, by the name of that call."""


class ProcessGroupShutDownError(ProcessGroupAbortedError):
    """The group was shut down, or gets other members, without a failure."""


class BackendProcessGroup(ProcessGroup):
    """A process group on one of torch's backends.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._communicator: Communicator | None = None

    @abstractmethod
    def _create(
        self, store: Store, host: str | None, rank: int, world_size: int, name: str, global_ranks: list[int] | None
    ) -> Communicator:
        """Return a communicator that is not connected yet. ``name`` is equal in all members, for torch's traces."""

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,  # noqa: ARG002
        global_ranks: list[int] | None = None,
        *,
        store: Store | None = None,
        host: str | None = None,
    ) -> None:
        check_rank(rank, world_size)
        self._end_communicator()
        store = store if store is not None else create_store_client(store_addr, self._timeout)
        name = f"{replica_id}/{group_rank or 0}@{quorum_id}"
        shared_name = f"keepstep/{group_rank or 0}@{quorum_id}"
        communicator = self._communicator = self._create(store, host, rank, world_size, shared_name, global_ranks)
        cause = None
        try:
            communicator.connect()
        except Exception as error:  # noqa: BLE001  raised below, unless an earlier failure caused it
            cause = error
            if not isinstance(error, KeepstepError | TimeoutError):
                error = ProcessGroupError(
                    f"{name}, rank {rank} of {world_size}, did not connect: {plain_message(error)}"
                )
            communicator.fail(error)
        failure = communicator.error
        if failure is not None:
            communicator.close()
            if isinstance(failure, ProcessGroupAbortedError):
                raise ProcessGroupAbortedError(f"configure was aborted: {failure}") from cause
            raise failure from (None if cause is failure else cause)

    def abort(self, reason: str | None = None) -> None:
        communicator = self._communicator
        if communicator is not None and communicator.error is None:
            reason = reason or "the process group was aborted"
            log.info("process group aborted", backend=self.getBackendName(), reason=reason)
            communicator.fail(ProcessGroupAbortedError(reason))

    def errored(self) -> Exception | None:
        return None if self._communicator is None else self._communicator.error

    def shutdown(self) -> None:
        self._end_communicator()
        super().shutdown()

    def _end_communicator(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.fail(ProcessGroupShutDownError("the process group was shut down"))
            communicator.close()
        self._wait_turn()  # an operation of several collectives must not begin one in the next configuration

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        communicator = self._communicator
        if communicator is not None and communicator.error is None and communicator.backend is not None:
            communicator.timeout = timeout
            communicator.backend.set_timeout(timeout)  # type: ignore[attr-defined]  # missing in torch's stub

    def rank(self) -> int:
        return 0 if self._communicator is None else self._communicator.rank

    def size(self) -> int:
        return 1 if self._communicator is None else self._communicator.size

    def _run(self, operation: str, *args: Any) -> Work:
        communicator = self._communicator
        if communicator is None:
            raise ProcessGroupError(
                f"cannot run {operation}: the process group is not configured; call configure first"
            )
        if communicator.error is not None or communicator.backend is None:
            raise ProcessGroupError(
                f"cannot run {operation}: the process group failed and must be configured again: {communicator.error}"
            ) from communicator.error
        single = _SINGLE.get(operation)
        if single is None:
            return self._start(communicator, operation, args)
        outputs, inputs, options = args
        pairs = zip(outputs, inputs, strict=True)
        return JointWork([self._start(communicator, single, (*pair, options)) for pair in pairs], outputs)

    def _start(self, communicator: Communicator, operation: str, args: tuple[Any, ...]) -> Work:
        try:
            raw = communicator.start(operation, args)
        except RuntimeError as error:
            if communicator.error is None and not _is_connection_error(error):
                raise  # an invalid call: the group still works
            failure = ProcessGroupError(f"{operation} failed and aborted the process group: {plain_message(error)}")
            communicator.fail(failure)
            raise failure from error
        return self._wrap(communicator, raw, operation, args[0])

    def _wrap(self, communicator: Communicator, raw: Work, operation: str, tensors: Any) -> BackendWork:
        return BackendWork(communicator, raw, operation, tensors)


def _is_connection_error(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or "gloo/transport" in str(error)


def check_rank(rank: int, world_size: int) -> None:
    """Raise ValueError unless ``rank`` is one of ``world_size`` ranks."""
    if not 0 <= rank < world_size:
        raise ValueError(f"invalid rank {rank}: expected 0 <= rank < world_size ({world_size})")
