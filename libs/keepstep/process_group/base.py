"""The interface of keepstep's process groups.

Each collective accepts torch's options object, or the plain value in its place (a reduce op, a root, a timeout), and
calls ``_run``, which subclasses implement.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
    GatherOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    Store,
    Work,
)

from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.process_group.reconfiguration import Handle, ReconfigureOptions
from keepstep.process_group.sequence import Sequence, Task
from keepstep.process_group.works import CompletedWork, StreamWork
from keepstep.runtime.devices import device_types

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # a str before torch 2.11

DEFAULT_TIMEOUT = timedelta(seconds=60)

Tensors = list[torch.Tensor]
Plain = ReduceOp | ReduceOp.RedOpType | timedelta | int | None
"""A reduce op, a timeout, or a root."""
O = TypeVar("O")  # noqa: E741


class ProcessGroup(TorchProcessGroup):  # its metaclass is not ABCMeta: abstract methods raise here
    """A process group that can be configured again for every new membership.

    It is a subclass of torch's ``ProcessGroup``, so DDP, FSDP and the functional collectives accept it. ``register``
    makes it available to ``torch.distributed`` by name. An operation that fails or is aborted raises in ``wait``.
    """

    works_report_all_errors = False
    """Whether ``wait`` reports every error. If False, check ``errored`` before you use the tensors of a work."""

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # rank and size, which this class overrides
        self._name: GroupName | None = None
        self._timeout = timeout
        self._handle = Handle()
        self._sequence = Sequence()

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
        """Connect this rank with its peers, and replace the previous configuration. Return when all are connected.

        Args:
            store_addr: ``host:port/prefix`` of a TCPStore; every call needs a new prefix.
            replica_id: name of this replica group, for logs and traces.
            rank: index of this replica group, from 0.
            world_size: number of replica groups.
            quorum_id: number of the quorum, for logs and traces.
            group_rank: rank within the replica group, for logs and traces.
            group_world_size: ignored; torchft passes it.
            global_ranks: global rank of each member, for torch's traces.
            store: store to use instead of the one at ``store_addr``.
            host: name or address of this machine that the peers can reach. Default: the address of the interface
                that reaches the store.

        Raises:
            ValueError: ``rank`` or ``store_addr`` is invalid.
            TimeoutError: not all members connected within the timeout of the group.
            ProcessGroupAbortedError: ``abort`` was called in the meantime.
            ProcessGroupError: the members could not connect. After any error the group is not configured.
        """
        raise NotImplementedError  # torch's metaclass of ProcessGroup is not ABCMeta: no abstractmethod

    @property
    def job_settings(self) -> Mapping[str, str]:
        """Settings, by name, that all groups of a job must share. A group with other ones is refused."""
        return {}

    @property
    def device(self) -> torch.device:
        """Device of the tensors that the collectives of this group take: the CPU, or the current accelerator."""
        return torch.device("cpu")

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group has torch's ``get_reconfigure_handle`` and ``reconfigure``."""
        return True

    def get_reconfigure_handle(self) -> str:
        """Return the name of this group for ``reconfigure`` of its peers.

        The first call starts a store, which ``shutdown`` frees. The peers meet there, so they must reach this machine.
        """
        return self._handle.text()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        """Connect with the members of ``opts``, in place of the previous ones. Return when all are connected.

        Args:
            opts: the new membership. This group's rank is the index of its handle.

        Returns:
            A completed work.

        Raises:
            TypeError: the handles are a set, which has no order.
            ValueError: this group's handle is missing, or the uuid was used before.
            TimeoutError: not all members connected in time.
            ProcessGroupError: the members could not connect, or ``abort`` was called in the meantime.
        """
        members = self._handle.rendezvous(opts)
        timeout = self._timeout
        if opts.timeout is not None:
            self.set_timeout(opts.timeout)
        try:
            self.configure(members.store_addr, f"r{members.rank}", members.rank, members.world_size, opts.uuid)
        finally:
            self.set_timeout(timeout)
        return CompletedWork([])

    def abort(self, reason: str | None = None) -> None:
        """End operations in flight, and a ``configure`` in progress. Does not wait; may be called from any thread.

        Until the next ``configure`` the group is unusable and ``errored`` returns the error.

        Args:
            reason: text of the error that the operations raise.
        """

    def errored(self) -> Exception | None:
        """Return the first error since the last ``configure``; None while the group works."""
        return None

    def shutdown(self) -> None:
        """Leave the group and free its resources. ``configure`` makes it usable again.

        Operations in flight fail, here and in the peers. Slower peers may still complete a collective on Gloo that has
        ended here.
        """
        self._handle.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of each operation that starts from now on.

        Args:
            timeout: the limit.
        """
        self._timeout = timeout

    def rendezvous_bytes(self, world_size: int, version: int) -> int:  # noqa: ARG002
        """Return the most bytes that each member stores at the rendezvous; 0: negligible.

        Args:
            world_size: number of members.
            version: version of the rendezvous that all members support.
        """
        return 0

    def _run(self, operation: str, *args: Any) -> Work:
        """Start a collective. ``operation`` is the method of torch's backends; ``args`` are its arguments."""
        raise NotImplementedError  # torch's metaclass of ProcessGroup is not ABCMeta: no abstractmethod

    def _begin(self, operation: str, *args: Any) -> Work:
        """Start a collective, after the operations of several collectives before it."""
        self._wait_turn()
        return self._run(operation, *args)

    def _wait_turn(self) -> None:
        self._sequence.wait_turn()

    def compose(self, task: Task, tensors: Tensors) -> Work:
        """Run an operation of several collectives.

        For tensors in main memory the task runs in a thread, after earlier ones; collectives that are started in the
        meantime wait for it. For other devices it runs at once, on the current stream.

        Args:
            task: begins collectives with the function that it gets, in the same order in all ranks, and waits for them.
                It runs without gradients.
            tensors: all tensors that it writes; value of the future.

        Returns:
            A Work. An error of the task is raised in ``wait``, or here if the task runs at once.
        """
        if all(tensor.is_cpu for tensor in tensors):
            return self._sequence.add(task, tensors, self._run, self.abort)
        self._wait_turn()
        with torch.no_grad():
            task(self._run)
        return StreamWork(tensors)

    # ---- collectives

    def allreduce(
        self, tensors: Tensors | torch.Tensor, opts: AllreduceOptions | Plain = None, timeout: timedelta | None = None
    ) -> Work:
        return self._begin("allreduce", _as_list(tensors), _as_options(AllreduceOptions, opts, timeout))

    def allreduce_coalesced(self, tensors: Tensors, opts: AllreduceCoalescedOptions | Plain = None) -> Work:
        return self._begin("allreduce_coalesced", tensors, _as_options(AllreduceCoalescedOptions, opts))

    def allgather(
        self,
        output_tensors: list[Tensors] | Tensors,
        input_tensors: Tensors | torch.Tensor,
        opts: AllgatherOptions | timedelta | None = None,
    ) -> Work:
        """Gather the tensors of all ranks.

        Args:
            output_tensors: for each input a list of ``size()`` tensors of its shape; for a single input, one list.
            input_tensors: the tensors of this rank.
            opts: torch's options, or a timeout.
        """
        if isinstance(input_tensors, torch.Tensor):
            output_tensors = [cast("Tensors", output_tensors)]
        return self._begin("allgather", output_tensors, _as_list(input_tensors), _as_options(AllgatherOptions, opts))

    def allgather_into_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: AllgatherOptions | timedelta | None = None
    ) -> Work:
        """Gather into outputs that are ``size()`` times their input, concatenated along the first dimension."""
        return self._begin(
            "allgather_into_tensor_coalesced", output_tensors, input_tensors, _as_options(AllgatherOptions, opts)
        )

    def _allgather_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        opts: AllgatherOptions | timedelta | None = None,
    ) -> Work:
        return self._begin("_allgather_base", output, input, _as_options(AllgatherOptions, opts))

    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]

    def reduce_scatter(
        self,
        output_tensors: Tensors | torch.Tensor,
        input_tensors: list[Tensors] | Tensors,
        opts: ReduceScatterOptions | Plain = None,
        timeout: timedelta | None = None,
    ) -> Work:
        """Reduce the tensors of all ranks, and leave to each rank its share.

        Args:
            output_tensors: the share of this rank.
            input_tensors: for each output a list of ``size()`` tensors of its shape; for a single output, one list.
            opts: torch's options, a reduce op, or a timeout.
            timeout: limit of this operation; default: that of the group.
        """
        if isinstance(output_tensors, torch.Tensor):
            input_tensors = [cast("Tensors", input_tensors)]
        opts = _as_options(ReduceScatterOptions, opts, timeout)
        return self._begin("reduce_scatter", _as_list(output_tensors), input_tensors, opts)

    def reduce_scatter_tensor_coalesced(
        self, output_tensors: Tensors, input_tensors: Tensors, opts: ReduceScatterOptions | Plain = None
    ) -> Work:
        """Reduce inputs that are ``size()`` times their output, concatenated along the first dimension."""
        return self._begin(
            "reduce_scatter_tensor_coalesced", output_tensors, input_tensors, _as_options(ReduceScatterOptions, opts)
        )

    def _reduce_scatter_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        opts: ReduceScatterOptions | Plain = None,
    ) -> Work:
        return self._begin("_reduce_scatter_base", output, input, _as_options(ReduceScatterOptions, opts))

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
        """Send rows of ``input`` to each rank, as many as ``input_split_sizes`` lists. Empty lists split evenly."""
        opts = _as_options(AllToAllOptions, opts)
        return self._begin("alltoall_base", output, input, output_split_sizes, input_split_sizes, opts)

    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def broadcast(
        self,
        tensors: Tensors | torch.Tensor,
        opts: BroadcastOptions | int | None = None,
        timeout: timedelta | None = None,
    ) -> Work:
        return self._begin("broadcast", _as_list(tensors), _as_options(BroadcastOptions, opts, timeout))

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Work:
        return self.broadcast([tensor], root)

    def scatter(  # type: ignore[override]
        self, output_tensors: Tensors, input_tensors: list[Tensors], opts: ScatterOptions | int | None = None
    ) -> Work:
        """Give each rank its tensor of the root's list. ``input_tensors``: of the root; empty in all other ranks."""
        return self._begin("scatter", output_tensors, input_tensors, _as_options(ScatterOptions, opts))

    def gather(  # type: ignore[override]
        self, output_tensors: list[Tensors], input_tensors: Tensors, opts: GatherOptions | int | None = None
    ) -> Work:
        """Gather the tensors of all ranks in the root. ``output_tensors``: of the root; empty in all other ranks."""
        return self._begin("gather", output_tensors, input_tensors, _as_options(GatherOptions, opts))

    def reduce(  # type: ignore[override]
        self, tensors: Tensors | torch.Tensor, opts: ReduceOptions | Plain = None
    ) -> Work:
        """Reduce the tensors of all ranks into those of the root."""
        return self._begin("reduce", _as_list(tensors), _as_options(ReduceOptions, opts))

    def barrier(self, opts: BarrierOptions | timedelta | None = None) -> Work:
        return self._begin("barrier", _as_options(BarrierOptions, opts))

    def send(self, tensors: Tensors, dst_rank: int, tag: int = 0) -> Work:
        return self._begin("send", tensors, dst_rank, tag)

    def recv(self, tensors: Tensors, src_rank: int, tag: int = 0) -> Work:
        return self._begin("recv", tensors, src_rank, tag)

    # ---- the interface of torch's ProcessGroup

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1

    def getRank(self) -> int:  # noqa: N802
        return self.rank()

    def getSize(self) -> int:  # noqa: N802
        return self.size()

    def getBackendName(self) -> str:  # noqa: N802
        raise NotImplementedError  # torch's metaclass of ProcessGroup is not ABCMeta: no abstractmethod

    def _set_group_name(self, name: GroupName) -> None:
        self._name = name

    @property
    def group_name(self) -> GroupName:
        """Name under which torch registered the group."""
        if self._name is None:
            raise ProcessGroupError(f"{self!r} has no name: call register first")
        return self._name

    def getGroupName(self) -> GroupName:  # noqa: N802
        return self.group_name

    def register(self, name: str) -> ProcessGroup:
        """Register the group with ``torch.distributed``, which must be initialised.

        Functional collectives and ``DeviceMesh`` accept the group from then on. torch handles it as a group of this
        process alone, because its size changes with the membership.

        Args:
            name: unique name of the group in this process.

        Returns:
            This group.
        """
        backend = f"{self.getBackendName()}-{name}"
        dist.Backend.register_backend(backend, lambda *_: self, devices=device_types())
        return cast("ProcessGroup", dist.new_group([dist.get_rank()], backend=backend, group_desc=backend))

    def unregister(self) -> None:
        """Undo ``register``, and shut the group down."""
        dist.destroy_process_group(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank()}, size={self.size()})"


def _as_list(tensors: list[torch.Tensor] | torch.Tensor) -> list[torch.Tensor]:
    """Return a list of tensors, also for a single one."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _as_options(kind: type[O], given: object, timeout: timedelta | None = None) -> O:
    """Return ``given`` if it is a ``kind``; otherwise a ``kind`` with the plain value set."""
    if type(given) is kind:
        return given
    made: Any = kind()
    match given:
        case None:
            pass
        case ReduceOp():
            made.reduceOp = given
        case timedelta():
            timeout = given
        case int():
            made.rootRank = given
        case _:
            raise TypeError(
                f"invalid options of type {type(given).__name__}: expected {kind.__name__} or a plain value"
            )
    if timeout is not None:
        made.timeout = timeout
    return cast("O", made)
