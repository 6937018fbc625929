"""Process groups that wrap or replace another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch.distributed.distributed_c10d import ReduceOp, Store, Work
from torch.futures import Future

from keepstep.process_group.base import ProcessGroup, Tensors
from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.process_group.reconfiguration import ReconfigureOptions
from keepstep.process_group.sequence import Task
from keepstep.process_group.works import CompletedWork, JointWork, writing
from keepstep_mesh.config.logging import get_logger

log = get_logger("keepstep.process_group")


class ProcessGroupDummy(ProcessGroup):
    """A group of one rank without peers or rendezvous, for tests and single processes.

    Args:
        rank: must be 0.
        world: must be 1.

    Raises:
        ValueError: another rank or size.
    """

    works_report_all_errors = True

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        if (rank, world) != (0, 1):
            raise ValueError(f"invalid rank {rank} of {world}: expected rank 0 of 1 in a dummy group")
        super().__init__()

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        if len(opts.handles) != 1:
            raise ValueError(f"invalid membership of {len(opts.handles)} handles: expected 1 in a dummy group")
        return super().reconfigure(opts)

    def getBackendName(self) -> str:  # noqa: N802
        return "keepstep-dummy"

    def _run(self, operation: str, *args: Any) -> Work:
        match operation, args:
            case "allgather", (outputs, inputs, _):
                for output, tensor in zip(outputs, inputs, strict=True):
                    output[0].copy_(tensor)
            case "reduce_scatter", (outputs, inputs, _):
                for output, tensors in zip(outputs, inputs, strict=True):
                    output.copy_(tensors[0])
            case "allgather_into_tensor_coalesced" | "reduce_scatter_tensor_coalesced", (outputs, inputs, _):
                for output, tensor in zip(outputs, inputs, strict=True):
                    output.copy_(tensor.view_as(output))
            case "_allgather_base" | "_reduce_scatter_base" | "alltoall_base", (output, tensor, *_):
                output.copy_(tensor.view_as(output))
            case "send" | "recv", _:
                raise ProcessGroupError(f"{operation} needs a peer, and this group has one member")
        return CompletedWork(args[0])


class ProcessGroupWrapper(ProcessGroup):
    """Forwards every call to another group.

    Args:
        pg: the group to wrap.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self._pg = pg

    @property
    def works_report_all_errors(self) -> bool:  # type: ignore[override]
        return self._pg.works_report_all_errors

    @property
    def job_settings(self) -> Mapping[str, str]:
        return self._pg.job_settings

    @property
    def device(self) -> torch.device:
        return self._pg.device

    @property
    def parent(self) -> ProcessGroup:
        """The wrapped group."""
        return self._pg

    def configure(self, *args: Any, store: Store | None = None, **kwargs: Any) -> None:
        self._reset()
        self._pg.configure(*args, store=store, **kwargs)

    def _reset(self) -> None:
        """Forget what happened under the previous membership."""

    @property
    def supports_reconfigure(self) -> bool:
        return self._pg.supports_reconfigure

    def get_reconfigure_handle(self) -> str:
        return self._pg.get_reconfigure_handle()

    def reconfigure(self, opts: ReconfigureOptions) -> Work:
        self._reset()
        return self._pg.reconfigure(opts)

    def abort(self, reason: str | None = None) -> None:
        self._pg.abort(reason)

    def errored(self) -> Exception | None:
        return self._pg.errored()

    def shutdown(self) -> None:
        self._pg.shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        self._pg.set_timeout(timeout)

    def rendezvous_bytes(self, world_size: int, version: int) -> int:
        return self._pg.rendezvous_bytes(world_size, version)

    def rank(self) -> int:
        return self._pg.rank()

    def size(self) -> int:
        return self._pg.size()

    def getBackendName(self) -> str:  # noqa: N802
        return self._pg.getBackendName()

    def _run(self, operation: str, *args: Any) -> Work:
        return self._pg._run(operation, *args)  # noqa: SLF001  both classes are of this package

    def _wait_turn(self) -> None:
        self._pg._wait_turn()  # noqa: SLF001

    def compose(self, task: Task, tensors: Tensors) -> Work:
        return self._pg.compose(task, tensors)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pg!r})"


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Stores the first error of an operation instead of raising it.

    ``error`` returns the stored error. From then until the next ``configure`` operations do nothing and leave their
    tensors unchanged.

    Args:
        pg: the group to wrap.
    """

    works_report_all_errors = False

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._error: Exception | None = None

    def _reset(self) -> None:
        self._error = None

    def report_error(self, error: Exception) -> None:
        """Store the first error, and skip operations until the next ``configure``.

        Args:
            error: returned by ``error()``, unless an earlier one is stored.
        """
        if self._error is None:
            log.warning("skipping operations until the next configure", reason=str(error))
            self._error = error

    def error(self) -> Exception | None:
        """Return the first error since the last ``configure``; None if no operation failed."""
        return self._error

    def errored(self) -> Exception | None:
        return self._error or super().errored()

    def _run(self, operation: str, *args: Any) -> Work:
        return self._swallow(partial(super()._run, operation, *args), args[0])

    def compose(self, task: Task, tensors: Tensors) -> Work:
        return self._swallow(partial(super().compose, task, tensors), tensors)

    def _swallow(self, start: Callable[[], Work], result: Any) -> Work:
        if self._error is None:
            try:
                return _SwallowingWork(self, start(), result)
            except Exception as error:  # noqa: BLE001  stored by report_error
                self.report_error(error)
        return CompletedWork(result)


class _SwallowingWork(Work):
    def __init__(self, group: ErrorSwallowingProcessGroupWrapper, work: Work, result: Any) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the operation; return False if it failed."""
        try:
            return self._work.wait(timeout)
        except Exception as error:  # noqa: BLE001
            self._group.report_error(error)
            return False

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the tensors, also if the operation failed."""
        return self._work.get_future().then(self._settle)

    def _settle(self, future: Future[Any]) -> Any:
        try:
            return future.value()
        except Exception as error:  # noqa: BLE001
            self._group.report_error(error)
            return self._result


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Fails operations on demand, for tests of error handling.

    Args:
        pg: the group to wrap.
    """

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._future_error: Exception | None = None

    def _reset(self) -> None:
        self._future_error = None

    def report_future_error(self, error: Exception) -> None:
        """Let the next operation run, then fail it.

        Args:
            error: raised by the operation's ``wait``.
        """
        self._future_error = error

    def _run(self, operation: str, *args: Any) -> Work:
        return self._fail(super()._run(operation, *args))

    def compose(self, task: Task, tensors: Tensors) -> Work:
        return self._fail(super().compose(task, tensors))

    def _fail(self, work: Work) -> Work:
        error, self._future_error = self._future_error, None
        return work if error is None else _FailingWork(work, error)


class _FailingWork(Work):
    def __init__(self, work: Work, error: Exception) -> None:
        super().__init__()
        self._work = work
        self._error = error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        raise self._error

    def get_future(self) -> Future[Any]:
        return self._work.get_future().then(self._fail)

    def _fail(self, _: Future[Any]) -> Any:
        raise self._error


class ManagerLike(Protocol):
    """Methods of a Manager that ``ManagedProcessGroup`` uses."""

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False, *, reduce_op: Any) -> Work: ...
    def num_participants(self) -> int: ...
    def participating_rank(self) -> int | None: ...


class _CopyingWork(Work):
    """A reduction whose result is copied to ``outputs``, from the bytes of each in ``pieces``, if it succeeded."""

    def __init__(self, work: Work, outputs: Tensors, pieces: Tensors) -> None:
        super().__init__()
        self._work = work
        self._outputs = outputs
        self._pieces = pieces

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        succeeded = self._work.wait(timeout)
        if succeeded:
            self._copy()
        return succeeded

    def get_future(self) -> Future[Any]:
        def copy(_: Future[Any]) -> Tensors:
            if self._work.wait():
                self._copy()
            return self._outputs

        return self._work.get_future().then(copy)

    def _copy(self) -> None:
        with writing(self._outputs), torch.no_grad():
            for output, piece in zip(self._outputs, self._pieces, strict=True):
                output.copy_(piece.view(output.dtype).view(output.shape))


class ManagedProcessGroup(ProcessGroup):
    """All-reduces through a Manager, which averages over the participating groups and receives the errors.

    ``size()`` returns the number of participating groups. ``allgather``, ``broadcast`` and ``barrier`` are all-reduces
    too, of ``size()`` times the bytes of a gathered tensor, so use them for small values; ranks and roots are those of
    ``Manager.participating_rank``. A group that heals or is a spare gives nothing, and gets the result. Other
    collectives raise ``ProcessGroupError``, because the Manager would not learn of their failures.

    Args:
        manager: a ``Manager``, or an object with its ``allreduce``, ``num_participants`` and ``participating_rank``.
    """

    def __init__(self, manager: ManagerLike) -> None:
        super().__init__()
        self._manager = manager

    @property
    def device(self) -> torch.device:
        """That of the Manager's process group; the CPU for an object that is no Manager."""
        device = getattr(getattr(self._manager, "steps", None), "device", None)
        return device if isinstance(device, torch.device) else super().device

    @property
    def supports_reconfigure(self) -> bool:
        return False

    def size(self) -> int:
        return self._manager.num_participants()

    def getBackendName(self) -> str:  # noqa: N802
        return "keepstep-managed"

    def _run(self, operation: str, *args: Any) -> Work:
        match operation:
            case "allreduce" | "allreduce_coalesced":
                tensors, options = args
                works = [self._manager.allreduce(tensor, reduce_op=options.reduceOp) for tensor in tensors]
            case "allgather":
                tensors, inputs, _ = args
                works = [self._gather(one, outputs) for outputs, one in zip(tensors, inputs, strict=True)]
            case "_allgather_base" | "allgather_into_tensor_coalesced":
                tensors, inputs = (args[0], args[1]) if isinstance(args[0], list) else ([args[0]], [args[1]])
                works = [
                    self._gather(one, list(output.view(-1, *one.shape)))
                    for output, one in zip(tensors, inputs, strict=True)
                ]
            case "broadcast":
                tensors, options = args
                works = [self._gather(one, [one], options.rootRank) for one in tensors]
            case "barrier":
                tensors = [torch.zeros(1, dtype=torch.int64, device=self.device)]
                works = [self._manager.allreduce(tensors[0], reduce_op=ReduceOp.SUM)]
            case _:
                raise ProcessGroupError(
                    f"ManagedProcessGroup does not support {operation}; it supports allreduce, allreduce_coalesced, "
                    f"allgather, broadcast and barrier"
                )
        return works[0] if len(works) == 1 else JointWork(works, tensors)

    def _gather(self, tensor: torch.Tensor, outputs: Tensors, root: int | None = None) -> Work:
        """Copy the tensor of each participating group, or only of ``root``, to ``outputs``, bit for bit.

        The bytes are summed as integers, to which all other groups add zeros.
        """
        groups, rank = self._manager.num_participants(), self._manager.participating_rank()
        if not isinstance(cast("object", rank), int | None):  # of a mock: this group is the first one
            groups, rank = len(outputs), 0
        if groups and root is None and len(outputs) != groups:
            raise ProcessGroupError(f"{len(outputs)} outputs for the tensors of size() = {groups} groups")
        if groups and root is not None and not 0 <= root < groups:
            raise ProcessGroupError(f"invalid root {root}: {groups} groups take part")
        words = max(2, -(-tensor.nbytes // 16) * 2)  # of 8 bytes; the largest elements have 16
        carrier = torch.zeros(len(outputs), words, dtype=torch.int64, device=tensor.device)
        pieces = [row.view(torch.uint8)[: tensor.nbytes] for row in carrier]
        if rank is not None and root in (None, rank):
            given = tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
            pieces[rank if root is None else 0].copy_(given.view(torch.uint8))
        return _CopyingWork(self._manager.allreduce(carrier, reduce_op=ReduceOp.SUM), outputs, pieces)

    def allreduce_quantized(self, tensor: torch.Tensor, reduce_op: Any) -> Work:
        """All-reduce with 8-bit values; see ``keepstep.collectives.allreduce_quantized``."""
        return self._manager.allreduce(tensor, should_quantize=True, reduce_op=reduce_op)
