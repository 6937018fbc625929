"""The parent's side: a process group whose collectives run in a child process.

Every ``configure`` kills the child and forks a new one. The tensors go through shared memory, so a child that still
writes when it is killed never writes to a tensor of the caller.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed.distributed_c10d import Store, Work

from keepstep.process_group.baby.child_connection import Connection
from keepstep.process_group.baby.children import Spawner
from keepstep.process_group.base import DEFAULT_TIMEOUT, ProcessGroup
from keepstep.process_group.group_errors import ProcessGroupAbortedError, ProcessGroupError
from keepstep.process_group.store_exchange import create_store_client
from keepstep.process_group.torch_backends.accelerator import current_accelerator
from keepstep.process_group.torch_backends.backend import check_rank
from keepstep.process_group.torch_backends.gloo import host_of
from keepstep.process_group.torch_backends.membership_changes import job_settings
from keepstep.process_group.torch_backends.nccl import require_accelerator


class ProcessGroupBaby(ProcessGroup):
    """A process group in a child process. Use one of its subclasses.

    A backend that blocks, or breaks its process, costs the child and not the trainer. Each operation copies its
    tensors to shared memory and back (CUDA: none), and takes about 0.2 ms longer than in the trainer.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.
    """

    works_report_all_errors = True
    _backend: ClassVar[str]

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(timeout)
        self._spawner: Spawner | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._rank, self._size = 0, 1

    def configure(
        self,
        store_addr: str,
        replica_id: str,
        rank: int,
        world_size: int,
        quorum_id: int | None = None,
        group_rank: int | None = None,
        group_world_size: int | None = None,
        global_ranks: list[int] | None = None,
        *,
        store: Store | None = None,
        host: str | None = None,
    ) -> None:
        check_rank(rank, world_size)
        self._end_child("the process group is configured again")
        store = store if store is not None else create_store_client(store_addr, self._timeout)
        if self._spawner is None or not self._spawner.alive:
            self._release_spawner()
            self._spawner = Spawner.shared()
        connection = Connection(self._spawner.fork(), store, self._timeout)
        with self._lock:
            self._connection, self._rank, self._size = connection, rank, world_size
        device = torch.accelerator.current_device_index() if self._backend != "gloo" else 0
        try:
            connection.configure(
                backend=self._backend,
                device=device,
                args=[replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks],
                host=host,
                store_host=host_of(store),
            )
        except Exception as error:
            connection.fail(error)
            connection.close()
            raise

    def abort(self, reason: str | None = None) -> None:
        connection = self._connection
        if connection is not None:
            connection.fail(ProcessGroupAbortedError(reason or "the process group was aborted"))

    def errored(self) -> Exception | None:
        connection = self._connection
        return None if connection is None else connection.error

    def shutdown(self) -> None:
        self._end_child("the process group was shut down")
        self._release_spawner()
        super().shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        connection = self._connection
        if connection is not None and connection.error is None:
            connection.set_timeout(timeout)

    @property
    def child_pid(self) -> int | None:
        """Process ID of the child; None if the group is not configured."""
        connection = self._connection
        return None if connection is None else connection.pid

    def num_active_work(self) -> int:
        """Return the number of operations in flight."""
        connection = self._connection
        return 0 if connection is None else connection.in_flight()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def getBackendName(self) -> str:  # noqa: N802
        return f"keepstep-baby-{self._backend}"

    def _run(self, operation: str, *args: Any) -> Work:
        connection = self._connection
        if connection is None:
            raise ProcessGroupError(
                f"cannot run {operation}: the process group is not configured; call configure first"
            )
        return connection.run(operation, args)

    def _end_child(self, reason: str) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            self._rank, self._size = 0, 1
        if connection is not None:
            connection.fail(ProcessGroupAbortedError(reason))
            connection.close()
        self._wait_turn()  # an operation of several collectives must not begin one in the next configuration

    def _release_spawner(self) -> None:
        spawner, self._spawner = self._spawner, None
        if spawner is not None:
            spawner.release()


class ProcessGroupBabyGloo(ProcessGroupBaby):
    """A process group on Gloo in a child process, for tensors in main memory.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.
    """

    _backend = "gloo"


class ProcessGroupBabyNCCL(ProcessGroupBaby):
    """A process group on NCCL in a child process, which shares the CUDA memory of the tensors.

    The child has a CUDA context of its own, of some hundred MiB. ``wait`` returns when the device has finished.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.

    Raises:
        ProcessGroupError: torch was built without NCCL, or this machine has no accelerator.
    """

    _backend = "nccl"

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        require_accelerator(self._backend.upper(), type(self).__name__)
        super().__init__(timeout)

    @property
    def device(self) -> torch.device:
        return current_accelerator()

    @property
    def job_settings(self) -> Mapping[str, str]:
        return job_settings()  # the child chooses alike


class ProcessGroupBabyXCCL(ProcessGroupBabyNCCL):
    """A process group on Intel's XCCL in a child process, through main memory.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.

    Raises:
        ProcessGroupError: torch was built without XCCL, or this machine has no accelerator.
    """

    _backend = "xccl"
