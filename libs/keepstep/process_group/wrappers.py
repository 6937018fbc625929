"""Process groups around, or in place of, another one."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import Store, Work
from torch.futures import Future

from keepstep.process_group.base import ProcessGroup, ProcessGroupError
from keepstep.process_group.works import CompletedWork, JointWork
from keepstep_mesh.config.logging import get_logger

log = get_logger("keepstep.process_group")


class ProcessGroupDummy(ProcessGroup):
    """A group of one that needs no peers and no rendezvous: every collective is what it is over a single rank."""

    works_tell_all = True

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        if (rank, world) != (0, 1):
            raise ValueError(f"a dummy group is rank 0 of 1, not rank {rank} of {world}")
        super().__init__()

    def configure(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do."""

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
    """Forwards every call to the group ``pg``."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__()
        self._pg = pg

    @property
    def works_tell_all(self) -> bool:  # type: ignore[override]
        return self._pg.works_tell_all

    @property
    def parent(self) -> ProcessGroup:
        """The group around which this one is."""
        return self._pg

    def configure(self, *args: Any, store: Store | None = None, **kwargs: Any) -> None:
        self._pg.configure(*args, store=store, **kwargs)

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
        return self._pg._run(operation, *args)  # noqa: SLF001  one class of ours to another

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._pg!r})"


class ErrorSwallowingProcessGroupWrapper(ProcessGroupWrapper):
    """Never raises from an operation. The first error is kept for ``error()``; from then until the next ``configure``
    operations do nothing and leave their tensors as they are.
    """

    works_tell_all = False

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self._error = None
        super().configure(*args, **kwargs)

    def report_error(self, error: Exception) -> None:
        """From now on, until the next ``configure``, operations are skipped."""
        if self._error is None:
            log.warning("operations are skipped until the next configure", reason=str(error))
            self._error = error

    def error(self) -> Exception | None:
        """The first error since the last ``configure``."""
        return self._error

    def errored(self) -> Exception | None:
        return self._error or super().errored()

    def _run(self, operation: str, *args: Any) -> Work:
        if self._error is None:
            try:
                return _SwallowingWork(self, super()._run(operation, *args), args[0])
            except Exception as error:  # noqa: BLE001  this is what the class is for; it is reported
                self.report_error(error)
        return CompletedWork(args[0])


class _SwallowingWork(Work):
    def __init__(self, group: ErrorSwallowingProcessGroupWrapper, work: Work, result: Any) -> None:
        super().__init__()
        self._group = group
        self._work = work
        self._result = result

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """False if the operation failed."""
        try:
            return self._work.wait(timeout)
        except Exception as error:  # noqa: BLE001
            self._group.report_error(error)
            return False

    def get_future(self) -> Future[Any]:
        """Completes with the operation's tensors, whether it failed or not."""
        return self._work.get_future().then(self._settle)

    def _settle(self, future: Future[Any]) -> Any:
        try:
            return future.value()
        except Exception as error:  # noqa: BLE001
            self._group.report_error(error)
            return self._result


class FakeProcessGroupWrapper(ProcessGroupWrapper):
    """Fails operations on demand, for tests of what happens then."""

    def __init__(self, pg: ProcessGroup) -> None:
        super().__init__(pg)
        self._future_error: Exception | None = None

    def configure(self, *args: Any, **kwargs: Any) -> None:
        self._future_error = None
        super().configure(*args, **kwargs)

    def report_future_error(self, error: Exception) -> None:
        """The next operation runs, then fails with ``error`` where it is waited for."""
        self._future_error = error

    def _run(self, operation: str, *args: Any) -> Work:
        work = super()._run(operation, *args)
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
    """The part of a Manager that ``ManagedProcessGroup`` uses."""

    def allreduce(self, tensor: torch.Tensor, *, reduce_op: Any) -> Work: ...
    def num_participants(self) -> int: ...


class ManagedProcessGroup(ProcessGroup):
    """All-reduces through a Manager, over the groups that take part in the step. The Manager gets the errors.

    ``size()`` is the number of groups that take part. Other operations raise ProcessGroupError, because the Manager
    would not notice their errors.
    """

    def __init__(self, manager: ManagerLike) -> None:
        super().__init__()
        self._manager = manager

    def size(self) -> int:
        return self._manager.num_participants()

    def getBackendName(self) -> str:  # noqa: N802
        return "keepstep-managed"

    def _run(self, operation: str, *args: Any) -> Work:
        if operation not in {"allreduce", "allreduce_coalesced"}:
            raise ProcessGroupError(
                f"{operation} is not supported by ManagedProcessGroup; it supports allreduce and allreduce_coalesced"
            )
        tensors, options = args
        works = [self._manager.allreduce(tensor, reduce_op=options.reduceOp) for tensor in tensors]
        return works[0] if len(works) == 1 else JointWork(works, tensors)
