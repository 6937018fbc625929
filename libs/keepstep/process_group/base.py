"""The base class of keepstep's process groups, with all forms in which torch calls a collective.

Each collective takes torch's options object, or a plain value in its place (a reduce op, a root, a timeout). All of
them call one method, ``_run``, which subclasses implement.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import ProcessGroup as TorchProcessGroup
from torch.distributed.distributed_c10d import (
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GroupName,
    ReduceOp,
    ReduceScatterOptions,
    Store,
    Work,
)

from keepstep_mesh.errors import KeepstepError

Tensors = list[torch.Tensor]
Plain = ReduceOp | ReduceOp.RedOpType | timedelta | int | None
O = TypeVar("O")  # noqa: E741


class ProcessGroupError(KeepstepError):
    """A collective failed, or the group is not configured. It works again after the next ``configure``."""


class ProcessGroupAbortedError(ProcessGroupError):
    """``abort`` ended the operation."""


class ProcessGroup(TorchProcessGroup):  # its metaclass is not ABCMeta, so abstract methods raise NotImplementedError
    """A process group that can be configured again for every new membership.

    It is a subclass of torch's ``ProcessGroup``, so DDP, FSDP and the functional collectives accept it; ``register``
    adds it to ``torch.distributed`` under a name. ``wait`` raises the error of an operation that failed or was aborted.
    """

    works_tell_all = False
    """Whether the tensors of a work that succeeded are correct. If False, check ``errored`` before you use them."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size; the methods below replace them
        self._name: GroupName | None = None

    def configure(  # torchft's signature
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
        """Connect this rank with its peers, in place of the previous configuration. Return when all are connected.

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore, with a prefix that was never used before.
            replica_id: of the replica group, for logs and traces.
            rank: of the replica group, in [0, world_size).
            world_size: number of replica groups.
            quorum_id: of the quorum, for logs and traces.
            group_rank: rank of this process within its replica group, for logs and traces.
            group_world_size: number of ranks in the replica group.
            global_ranks: ranks of the members in the job, for logs and traces.
            store: used instead of ``store_addr``.
            host: name or address of this machine that the peers can reach; default: that of the interface from which
                the store is reached.

        Raises:
            Exception: the reason why the group could not be configured. It cannot be used then.
        """
        raise NotImplementedError

    def abort(self, reason: str | None = None) -> None:
        """End operations in flight, and a ``configure`` in progress. From any thread; does not wait.

        The group cannot be used until the next ``configure``, and ``errored`` returns the reason.

        Args:
            reason: for errors and logs.
        """

    def errored(self) -> Exception | None:
        """Return the error that broke this group since the last ``configure``; None without one."""
        return None

    def shutdown(self) -> None:
        """Abort, and free everything. The group can be configured again."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of operations that start from now on."""

    def rendezvous_bytes(self, world_size: int, version: int) -> int:  # noqa: ARG002
        """Return the most bytes that each member stores to configure, in a store of ``version``; 0: almost none."""
        return 0

    def _run(self, operation: str, *args: Any) -> Work:
        """Start the collective that torch's backends call ``operation``, with the arguments of the backend."""
        raise NotImplementedError

    # ---- collectives

    def allreduce(
        self, tensors: Tensors | torch.Tensor, opts: AllreduceOptions | Plain = None, timeout: timedelta | None = None
    ) -> Work:
        return self._run("allreduce", _listed(tensors), _options(AllreduceOptions, opts, timeout))

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | Plain = None) -> Work:
        return self._run("allreduce_coalesced", tensors, _options(AllreduceCoalescedOptions, opts))

    def allgather(
        self,
        output_tensors: list[Tensors] | Tensors,
        input_tensors: Tensors | torch.Tensor,
        opts: AllgatherOptions | timedelta | None = None,
    ) -> Work:
        """``output_tensors``: for each input a list of ``size()`` tensors of its shape; or that list for one input."""
        if isinstance(input_tensors, torch.Tensor):
            output_tensors = [cast("Tensors", output_tensors)]
        return self._run("allgather", output_tensors, _listed(input_tensors), _options(AllgatherOptions, opts))

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllgatherOptions | timedelta | None = None
    ) -> Work:
        """Each output holds ``size()`` times its input, concatenated along the first dimension."""
        return self._run(
            "allgather_into_tensor_coalesced", output_tensors, input_tensors, _options(AllgatherOptions, opts)
        )

    def _allgather_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        opts: AllgatherOptions | timedelta | None = None,
    ) -> Work:
        return self._run("_allgather_base", output, input, _options(AllgatherOptions, opts))

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter(
        self,
        output_tensors: Tensors | torch.Tensor,
        input_tensors: list[Tensors] | Tensors,
        opts: ReduceScatterOptions | Plain = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """``input_tensors``: for each output a list of ``size()`` tensors of its shape; or that list for one output."""
        if isinstance(output_tensors, torch.Tensor):
            input_tensors = [cast("Tensors", input_tensors)]
        opts = _options(ReduceScatterOptions, opts, timeout)
        return self._run("reduce_scatter", _listed(output_tensors), input_tensors, opts)

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: ReduceScatterOptions | Plain = None
    ) -> Work:
        """Each input holds ``size()`` times its output, concatenated along the first dimension."""
        return self._run(
            "reduce_scatter_tensor_coalesced", output_tensors, input_tensors, _options(ReduceScatterOptions, opts)
        )

    def _reduce_scatter_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        opts: ReduceScatterOptions | Plain = None,
    ) -> Work:
        return self._run("_reduce_scatter_base", output, input, _options(ReduceScatterOptions, opts))

    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: AllToAllOptions | timedelta | None = None,
    ) -> Work:
        """Rows of ``input`` by ``input_split_sizes`` to each rank; empty sizes split evenly."""
        opts = _options(AllToAllOptions, opts)
        return self._run("alltoall_base", output, input, output_split_sizes, input_split_sizes, opts)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def broadcast(
        self,
        tensors: Tensors | torch.Tensor,
        opts: BroadcastOptions | int | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return self._run("broadcast", _listed(tensors), _options(BroadcastOptions, opts, timeout))

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        return self.broadcast([tensor], root)

    def barrier(self, opts: BarrierOptions | timedelta | None = None) -> Work:
        return self._run("barrier", _options(BarrierOptions, opts))

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        return self._run("send", tensors, dst_rank, tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        return self._run("recv", tensors, src_rank, tag)

    # ---- what torch asks of a process group

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def getRank(self) -> int:  # noqa: N802
        return self.rank()

    def getSize(self) -> int:  # noqa: N802
        return self.size()

    def getBackendName(self) -> str:  # noqa: N802
        raise NotImplementedError

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    @property
    def group_name(self) -> GroupName:
        """Under which torch registered the group."""
        if self._name is None:
            raise ProcessGroupError(f"{self!r} has no name before it is registered")
        return self._name

    def getGroupName(self) -> GroupName:  # noqa: N802
        return self.group_name

    def register(self, name: str) -> ProcessGroup:
        """Makes the group known to ``torch.distributed`` (which must be initialised), under ``name``.

        Functional collectives and ``DeviceMesh`` work with it from then on. torch takes it for a group of this process
        alone, since its size changes with the membership. Returns the group.
        """
        backend = f"{self.getBackendName()}-{name}"
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        dist.Backend.register_backend(backend, lambda *_: self, devices=devices)
        return cast("ProcessGroup", dist.new_group([dist.get_rank()], backend=backend, group_desc=backend))

    def unregister(self) -> None:
        """Takes back ``register``, and shuts the group down."""
        dist.destroy_process_group(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank()}, size={self.size()})"


def _listed(tensors: Tensors | torch.Tensor) -> Tensors:
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _options(kind: type[O], given: object, timeout: timedelta | None = None) -> O:
    """``given`` if it is a ``kind``; else a ``kind`` with the plain value set."""
    if type(given) is kind:
        return given
    options: Any = kind()
    match given:
        case None:
            pass
        case ReduceOp():
            options.reduceOp = given
        case timedelta():
            timeout = given
        case int():
            options.rootRank = given
        case _:
            raise TypeError(f"{kind.__name__} or a plain value was expected, not {type(given).__name__}")
    if timeout is not None:
        options.timeout = timeout
    return cast("O", options)
