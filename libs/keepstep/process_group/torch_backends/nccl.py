"""NCCL and XCCL: collectives on an accelerator, on the streams of their communicator."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, Work

from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.process_group.torch_backends.accelerator import (
    AcceleratorCommunicator,
    AcceleratorWork,
    current_accelerator,
)
from keepstep.process_group.torch_backends.backend import BackendProcessGroup
from keepstep.process_group.torch_backends.backend_work import flat_tensors
from keepstep.process_group.torch_backends.communicator import Communicator
from keepstep.process_group.torch_backends.gloo import ProcessGroupGloo
from keepstep.process_group.torch_backends.membership_changes import (
    KeptBackend,
    MemberChange,
    ReconfiguredCommunicator,
    chosen_change,
    job_settings,
)
from keepstep.process_group.torch_backends.torch_variables import nccl_variables, refuse_detailed_debugging
from keepstep.runtime.devices import refuse_capture


class ProcessGroupNCCL(BackendProcessGroup):
    """A process group on NCCL, for CUDA tensors on the device that is current during ``configure``.

    With torch >= 2.14 and an NCCL that can do it, it keeps torch's backend when members join or leave;
    ``KEEPSTEP_NCCL_MEMBERS=rebuild`` makes a new one for each membership. All groups of a job must do the same.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.

    Raises:
        ProcessGroupError: torch was built without NCCL, this machine has no accelerator,
            ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` is set, or ``KEEPSTEP_NCCL_MEMBERS=torch`` is not possible here.
        ValueError: ``KEEPSTEP_NCCL_MEMBERS`` has another value.
    """

    _backend_name = "NCCL"
    _missing_dtypes: Mapping[torch.dtype, torch.dtype] = {
        torch.int16: torch.int32,
        torch.uint16: torch.int32,
        torch.uint32: torch.int64,
        torch.uint64: torch.int64,
        torch.complex32: torch.complex64,
    }
    """For each dtype that the backend does not have, a larger one that it has."""
    _can_change_members = True
    """Whether some version of torch changes the members of the backend."""

    def __init__(self, timeout: timedelta = timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        self._torch_class = require_accelerator(self._backend_name, type(self).__name__)
        refuse_detailed_debugging(type(self).__name__)
        self._kept: KeptBackend | None = None
        """The backend that changes its members; None: each membership has one of its own."""
        if self._can_change_members and chosen_change() is MemberChange.TORCH:
            self._kept = KeptBackend(self._create_kept)

    @property
    def job_settings(self) -> Mapping[str, str]:
        return job_settings() if self._can_change_members else {}

    @property
    def device(self) -> torch.device:
        return current_accelerator()

    def getBackendName(self) -> str:  # noqa: N802
        return f"keepstep-{self._backend_name.lower()}"

    def _run(self, operation: str, *args: Any) -> Work:
        tensors = list(flat_tensors(args))
        refuse_capture(tensors)
        for tensor in tensors:
            larger = self._missing_dtypes.get(tensor.dtype)
            if larger is not None:
                raise ProcessGroupError(
                    f"cannot run {operation} with {tensor.dtype}: {self._backend_name} does not have it; convert the "
                    f"tensor to {larger} first"
                )
        if operation == "alltoall_base":
            args = _with_sizes(args, self.size())
        return super()._run(operation, *args)

    def errored(self) -> Exception | None:
        """Wait for the current stream; then return the first error since the last ``configure``.

        A collective that takes too long is aborted, which frees the stream.
        """
        if isinstance(self._communicator, AcceleratorCommunicator):
            self._communicator.await_stream()
        return super().errored()

    def _create(
        self,
        store: Store,
        host: str | None,  # noqa: ARG002  # NCCL reads NCCL_SOCKET_IFNAME instead
        rank: int,
        world_size: int,
        name: str,
        global_ranks: list[int] | None,
    ) -> AcceleratorCommunicator:
        if self._kept is not None:
            return ReconfiguredCommunicator(self._kept, store, rank, world_size, self._timeout, self._variables())
        options = self._options()
        options.group_name = name
        options.global_ranks_in_group = global_ranks or []
        options._timeout = self._timeout  # noqa: SLF001  # its only name in torch
        variables = self._variables()
        return AcceleratorCommunicator(self._torch_class, options, store, rank, world_size, self._timeout, variables)

    def _options(self) -> Any:
        options = self._torch_class.Options()
        options.config.blocking = 0
        return options

    def _create_kept(self, store: Store) -> Any:
        """Return a backend without members. Its rank and size are those of its next membership."""
        options = self._torch_class.Options()
        options.enable_reconfigure = True
        options.group_name = "keepstep"
        options._timeout = self._timeout  # noqa: SLF001  its only name in torch
        create = getattr(dist, "ProcessGroupNCCL2")  # noqa: B009  # missing in torch 2.13
        try:
            return create(store, 0, 1, options, current_accelerator())
        except TypeError:  # torch 2.14 has no argument for the device, and takes that of this thread
            return create(store, 0, 1, options)

    def shutdown(self) -> None:
        super().shutdown()
        if self._kept is not None:
            self._kept.close()

    def _variables(self) -> dict[str, str]:
        """Return the environment variables for the creation of a backend."""
        return nccl_variables(self._timeout)

    def _wrap(self, communicator: Communicator, raw: Work, operation: str, tensors: Any) -> AcceleratorWork:
        return AcceleratorWork(cast("AcceleratorCommunicator", communicator), raw, operation, tensors)


def _with_sizes(args: tuple[Any, ...], parts: int) -> tuple[Any, ...]:
    """Give an even split its sizes.

    Without them torch 2.11 calls ``ncclAlltoAll`` of NCCL 2.28, and takes the answer of a communicator that does not
    block ("operation in progress") for an error. With them it sends and receives, which it awaits.
    """
    output, rows, received, sent, options = args
    if not (received or sent) and output.dim() and rows.dim() and len(output) % parts == len(rows) % parts == 0:
        received, sent = [len(output) // parts] * parts, [len(rows) // parts] * parts
    return output, rows, received, sent, options


def require_accelerator(backend: str, name: str) -> Any:
    """Return torch's process group class of ``backend``.

    Raises:
        ProcessGroupError: torch was built without it, or this machine has no accelerator. It names class ``name``.
    """
    torch_class = getattr(dist, f"ProcessGroup{backend}", None)
    if torch_class is None or not torch.accelerator.is_available():
        raise ProcessGroupError(
            f"{name} requires a torch build with {backend} and an accelerator; use ProcessGroupGloo on this machine"
        )
    return torch_class


class ProcessGroupXCCL(ProcessGroupNCCL):
    """A process group on Intel's XCCL.

    Args:
        timeout: limit of the rendezvous and of each operation; default 60 s.

    Raises:
        ProcessGroupError: torch was built without XCCL, or this machine has no accelerator.
    """

    _backend_name = "XCCL"
    _can_change_members = False
    _missing_dtypes: Mapping[torch.dtype, torch.dtype] = {}

    def _options(self) -> Any:
        return self._torch_class.Options()

    def _variables(self) -> dict[str, str]:
        return {}


def group_class(device_type: str) -> type[BackendProcessGroup]:
    """Return the class of a process group for tensors on ``cpu``, ``cuda`` or ``xpu``."""
    return {"cuda": ProcessGroupNCCL, "xpu": ProcessGroupXCCL}.get(device_type, ProcessGroupGloo)
