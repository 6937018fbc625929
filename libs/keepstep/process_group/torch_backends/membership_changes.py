"""torch's own change of members (torch >= 2.14): one backend of torch for several memberships.

torch creates such a backend without members, and connects the members of each membership with ``reconfigure``. All
groups of a job change their members in the same way, because the two ways do not meet.

A change without a failure keeps the backend. An abort ends it, so that the next membership begins with a new one: what
torch leaves of a backend that was aborted is not part of its contract.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.process_group.store_exchange import reconfigure_over
from keepstep.process_group.torch_backends.accelerator import AcceleratorCommunicator
from keepstep.process_group.torch_backends.backend import ProcessGroupShutDownError
from keepstep.process_group.torch_backends.backend_work import plain_message
from keepstep.process_group.torch_backends.disposal import dispose
from keepstep.process_group.torch_backends.torch_variables import environment
from keepstep.runtime.environment import variable

VARIABLE = "NCCL_MEMBERS"
SETTING = "nccl_members"
"""Name of the setting that all groups must share."""
OLDEST_NCCL = (2, 29)
"""The oldest one whose communicators can be revoked, which torch needs."""


class MemberChange(StrEnum):
    """How a process group on NCCL changes its members."""

    AUTO = "auto"
    """``TORCH`` where torch has it, else ``REBUILD``."""
    TORCH = "torch"
    """``reconfigure`` of torch's backend."""
    REBUILD = "rebuild"
    """A new backend for each membership."""


def chosen_change() -> MemberChange:
    """Return how groups on NCCL change their members: as ``KEEPSTEP_NCCL_MEMBERS`` says; default: ``auto``.

    Raises:
        ValueError: the variable has another value.
        ProcessGroupError: it is ``torch``, and torch has no such backend.
    """
    text = variable(VARIABLE) or MemberChange.AUTO
    if text not in list(MemberChange):
        raise ValueError(f"KEEPSTEP_{VARIABLE}={text!r} must be one of {', '.join(MemberChange)}")
    change, missing = MemberChange(text), missing_for_torch()
    if change is MemberChange.TORCH and missing:
        raise ProcessGroupError(f"KEEPSTEP_{VARIABLE}=torch needs {missing}: unset the variable, or install them")
    if change is MemberChange.AUTO:
        return MemberChange.REBUILD if missing else MemberChange.TORCH
    return change


def job_settings() -> dict[str, str]:
    """Return the settings that all groups of a job on NCCL must share. ``REBUILD`` is that of older builds."""
    return {SETTING: str(MemberChange.TORCH)} if chosen_change() is MemberChange.TORCH else {}


def missing_for_torch() -> str:
    """Return what is missing for torch's own change of members; empty: nothing."""
    if torch.version.hip:
        return "NVIDIA's NCCL: AMD's RCCL cannot revoke a communicator"
    if getattr(dist, "ProcessGroupNCCL2", None) is None:
        return "ProcessGroupNCCL2 of torch >= 2.14"
    if not dist.is_nccl_available():
        return "a torch build with NCCL"
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    if version < OLDEST_NCCL:
        return f"NCCL >= {'.'.join(map(str, OLDEST_NCCL))}, not {'.'.join(map(str, version))}"
    return ""


class MembershipStore(Store):
    """The store of the present membership, for a backend that keeps its store. ``follow`` sets it."""

    def __init__(self) -> None:
        super().__init__()
        self._present: Store | None = None

    def follow(self, store: Store) -> None:
        """Forward to ``store``, which no other membership has."""
        self._present = store

    def _store(self) -> Store:
        if self._present is None:
            raise ProcessGroupError("the backend has no membership yet")
        return self._present

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # the type that torch passes
        self._store().set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        return bytes(self._store().get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if timeout is None:
            self._store().wait(list(keys))
        else:
            self._store().wait(list(keys), timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._store().check(list(keys))

    def add(self, key: str, amount: int) -> int:
        return self._store().add(key, amount)

    def compare_set(self, key: str, expected: str | bytes, desired: bytes) -> bytes:  # type: ignore[override]
        """Set a key, with which rank 0 claims the membership: no other rank sets it."""
        del expected
        self.set(key, desired)
        return desired

    def delete_key(self, key: str) -> bool:  # noqa: ARG002
        """Do nothing: the keys end with the membership."""
        return True


class KeptBackend:
    """A backend of torch for several memberships, and its store. Safe to use from several threads.

    Args:
        create: returns a new backend with the store.
    """

    def __init__(self, create: Callable[[Store], Any]) -> None:
        self._create = create
        self._lock = threading.Lock()
        self._backend: Any = None
        self._store = MembershipStore()
        self._owner: object = None

    def begin(self, owner: object) -> None:
        """Let only ``owner`` take the backend from now on."""
        with self._lock:
            self._owner = owner

    def take(self, owner: object, store: Store) -> Any:
        """Return the backend, which meets its next members in ``store``.

        Raises:
            ProcessGroupError: another membership has begun since.
        """
        with self._lock:
            if owner is not self._owner:
                raise ProcessGroupError("the membership is over")
            if self._backend is None:
                self._store = MembershipStore()
                self._backend = self._create(self._store)
            self._store.follow(store)
            return self._backend

    @property
    def is_kept(self) -> bool:
        """Whether the next membership has the backend of the last one."""
        return self._backend is not None

    def drop(self) -> None:
        """Let the next membership have a new backend. The owner of the present one frees it."""
        with self._lock:
            self._backend = None

    def close(self) -> None:
        """Free the backend, after the end of its last membership."""
        with self._lock:
            backend, self._backend, self._owner = [self._backend], None, None
        if backend[0] is not None:
            dispose(backend)


class ReconfiguredCommunicator(AcceleratorCommunicator):
    """A membership of a ``KeptBackend``.

    Args:
        kept: the backend.
        store: rendezvous of the members.
        rank: of this process among the members.
        size: number of members.
        timeout: of the connection and of each operation.
        variables: environment variables while the backend is created.
    """

    def __init__(
        self,
        kept: KeptBackend,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(None, None, store, rank, size, timeout, variables)
        self._kept = kept
        kept.begin(self)

    def _connect(self, device: torch.device) -> None:
        with environment(self._variables):
            self.backend = self._kept.take(self, self._store)
        if self.error is not None:
            raise self.error
        problem = self._change_members()
        if problem:
            self._kept.drop()
            raise ProcessGroupError(problem)
        self._run_first_collective(device)

    def _change_members(self) -> str:
        """Return why it failed; empty: it did not. The error itself would keep the backend alive."""
        try:
            reconfigure_over(self.backend, self._store, self.rank, self.size, self.timeout)  # type: ignore[arg-type]
        except Exception as error:  # noqa: BLE001  torch has no narrower error
            return (
                f"torch could not change the members: {plain_message(error)}; if it never can, set "
                f"KEEPSTEP_{VARIABLE}=rebuild in all groups"
            )
        return ""

    def _abort_backend(self, backend: Any) -> None:
        if isinstance(self.error, ProcessGroupShutDownError) and self.is_idle():
            return
        self._kept.drop()
        super()._abort_backend(backend)

    def is_idle(self) -> bool:
        return self._connecting.done() and not self._connecting.cancelled() and super().is_idle()

    def close(self) -> None:
        if self._kept.is_kept:
            self.backend = None  # the next membership has it
        super().close()
