"""Communicators of an accelerator, on a machine without one: torch's backend, streams and events are replaced."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode
from torch.distributed import Work
from torch.futures import Future

from keepstep.process_group import (
    ProcessGroupAbortedError,
    ProcessGroupError,
    ProcessGroupGloo,
    ProcessGroupNCCL,
    ProcessGroupXCCL,
)
from keepstep.process_group.torch_backends import accelerator as module
from keepstep.process_group.torch_backends.accelerator import AcceleratorCommunicator, AcceleratorWork
from keepstep.process_group.torch_backends.nccl import group_class
from keepstep.process_group.torch_backends.stream_watch import BACKLOG_POLL_SECONDS, StreamWatch
from keepstep.process_group.torch_backends.torch_variables import environment, nccl_variables
from keepstep_mesh.errors import ForkError

LONG = timedelta(seconds=7)
DEADLINE = 60.0
WATCHDOG = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class Stream:
    """Stands still until ``free`` is set."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()

    def synchronize(self) -> None:
        assert self.free.wait(DEADLINE)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    monkeypatch.setenv("KEEPSTEP_NCCL_MEMBERS", "rebuild")  # test_membership_changes.py has the other way
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _index: None)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: made)
    monkeypatch.setattr(torch, "Stream", lambda _device: contextlib.nullcontext())
    return made


class Backend:
    """torch's NCCL backend. ``gate``: when the peers are connected."""

    def __init__(self, *_arguments: object) -> None:
        self.gate, self.connecting, self.aborted = threading.Event(), threading.Event(), threading.Event()
        self.seen = dict(os.environ)
        self.gate.set()

    def eager_connect_single_device(self, _device: torch.device) -> None:
        """Return at once, as torch's does, while NCCL still connects."""

    def allreduce(self, _tensors: list[torch.Tensor], _options: object) -> Operation:
        self.connecting.set()
        assert self.gate.wait(DEADLINE)
        operation = Operation()
        operation.future.set_result([])
        return operation

    def abort(self) -> None:
        self.aborted.set()


class Operation(Work):
    """A Work as torch returns it for a collective; the test completes it."""

    def __init__(self) -> None:
        super().__init__()
        self.future: Future[list[torch.Tensor]] = Future()

    def get_future(self) -> Future[list[torch.Tensor]]:
        return self.future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        return True


def communicator(backend: Any) -> AcceleratorCommunicator:
    return AcceleratorCommunicator(lambda *_: backend, None, dist.HashStore(), 0, 2, LONG, nccl_variables(LONG))


# ---- connect


@pytest.mark.usefixtures("stream")
def test_torch_reads_its_variables_while_it_creates_the_backend_and_the_user_keeps_his_own(monkeypatch) -> None:
    monkeypatch.setenv(WATCHDOG, "1")  # as torchrun sets it
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    made = AcceleratorCommunicator(Backend, None, dist.HashStore(), 0, 2, LONG, nccl_variables(LONG))
    made.connect()
    backend: Any = made.backend
    assert nccl_variables(LONG).items() <= backend.seen.items()
    assert backend.seen["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "7"
    assert os.environ[WATCHDOG] == "1"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    made.fail(ProcessGroupAbortedError("over"))
    made.close()


def test_variables_are_restored_after_an_error() -> None:
    with pytest.raises(RuntimeError), environment({WATCHDOG: "0"}):
        raise RuntimeError("no memory")
    assert WATCHDOG not in os.environ


@pytest.mark.usefixtures("stream")
def test_connect_returns_when_the_peers_are_connected_and_not_before() -> None:
    backend = Backend()
    backend.gate.clear()
    made = communicator(backend)
    thread = threading.Thread(target=made.connect)
    thread.start()
    assert backend.connecting.wait(DEADLINE)
    assert thread.is_alive()
    backend.gate.set()
    thread.join(DEADLINE)
    assert not thread.is_alive()
    made.fail(ProcessGroupAbortedError("over"))
    made.close()


@pytest.mark.usefixtures("stream")
def test_an_abort_frees_connect_while_torch_still_connects_and_leaves_the_backend_behind() -> None:
    backend = Backend()
    backend.gate.clear()
    made, raised = communicator(backend), []

    def connect() -> None:
        try:
            made.connect()
        except ProcessGroupAbortedError as error:
            raised.append(str(error))

    thread = threading.Thread(target=connect)
    thread.start()
    assert backend.connecting.wait(DEADLINE)
    made.fail(ProcessGroupAbortedError("r1 was lost"))
    thread.join(DEADLINE)
    made.close()
    assert raised == ["r1 was lost"]
    backend.gate.set()  # torch's own timeout
    assert backend.aborted.wait(DEADLINE)


class Unreachable:
    """A backend that does not connect."""

    def __init__(self, *_arguments: object) -> None:
        self.eager_connect_single_device = self.refuse

    @staticmethod
    def refuse(_device: torch.device) -> None:
        raise RuntimeError("no route to host")


@pytest.mark.usefixtures("stream")
def test_the_error_of_a_backend_that_does_not_connect_does_not_keep_it() -> None:
    made = AcceleratorCommunicator(Unreachable, None, dist.HashStore(), 0, 2, LONG)
    with pytest.raises(RuntimeError, match="no route to host") as kept:
        made.connect()
    freed = weakref.ref(made.backend)
    made.backend = None
    assert freed() is None, f"the traceback of {kept.value!r} keeps it"


# ---- the process group


class TorchClass(Backend):
    class Options:
        def __init__(self) -> None:
            self.config = type("Config", (), {"blocking": 1})()

    def __init__(self, _store: object, _rank: int, _size: int, options: Any) -> None:
        super().__init__()
        self.options = options
        self.timeouts: list[timedelta] = []

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeouts.append(timeout)


@pytest.mark.usefixtures("stream")
def test_members_have_one_name_in_traces_and_torch_has_the_timeout_of_the_group(monkeypatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchClass, raising=False)
    found = []
    for rank in (0, 1):
        group = ProcessGroupNCCL(LONG)
        group.configure("", f"r{rank}", rank, 2, 5, group_rank=3, store=dist.HashStore())
        found.append(group._communicator.backend.options)
        group.shutdown()
    assert [one.group_name for one in found] == ["keepstep/3@5"] * 2
    assert [one._timeout for one in found] == [LONG] * 2


@pytest.mark.usefixtures("stream")
def test_a_timeout_that_is_set_after_an_abort_is_that_of_the_next_configuration(monkeypatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchClass, raising=False)
    group = ProcessGroupNCCL(timedelta(seconds=60))
    group.configure("", "r0", 0, 2, 1, store=dist.HashStore())
    aborted: Any = group._communicator.backend
    group.abort("injected")
    group.set_timeout(LONG)
    assert aborted.timeouts == []
    group.configure("", "r0", 0, 2, 2, store=dist.HashStore())
    assert group._communicator.backend.options._timeout == LONG
    group.shutdown()


@pytest.mark.usefixtures("stream")
def test_detailed_debugging_of_torch_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchClass, raising=False)
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    with pytest.raises(ProcessGroupError, match="TORCH_DISTRIBUTED_DEBUG=DETAIL"):
        ProcessGroupNCCL()


@pytest.mark.usefixtures("stream")
def test_a_dtype_that_nccl_does_not_have_is_refused_by_name_before_the_collective(monkeypatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchClass, raising=False)
    group = ProcessGroupNCCL(LONG)
    group.configure("", "r0", 0, 2, 1, store=dist.HashStore())
    for dtype, larger in ((torch.int16, "int32"), (torch.uint32, "int64")):
        with pytest.raises(ProcessGroupError, match=rf"allgather with {dtype}: NCCL .* torch.{larger} first"):
            group.allgather([torch.zeros(1, dtype=dtype)], torch.zeros(1, dtype=dtype))
    assert group.errored() is None, "the group still works"
    group.shutdown()


@pytest.mark.usefixtures("stream")
def test_an_even_exchange_of_rows_has_sizes_because_torch_takes_ncclalltoall_in_progress_for_an_error(
    monkeypatch,
) -> None:
    """torch 2.11 with NCCL 2.28 on an H200: ``NCCL Error 7: NCCL operation in progress``, only without sizes."""
    seen: list[tuple[list[int], list[int]]] = []

    def exchange(
        _self: Backend, _out: object, _in: object, outgoing: list[int], incoming: list[int], _: object
    ) -> Work:
        seen.append((outgoing, incoming))
        return Operation()

    monkeypatch.setattr(TorchClass, "alltoall_base", exchange, raising=False)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchClass, raising=False)
    monkeypatch.setattr(AcceleratorCommunicator, "mark", lambda _self: torch.Event())
    group = ProcessGroupNCCL(LONG)
    group.configure("", "r0", 0, 2, 1, store=dist.HashStore())
    rows = torch.zeros(6, 3)
    group.alltoall_base(torch.zeros(6, 3), rows, [], [])
    group.alltoall_base(torch.zeros(2, 3), rows, [1, 1], [2, 4])
    group.alltoall_base(torch.zeros(5), torch.zeros(5), [], [])
    assert seen == [([3, 3], [3, 3]), ([1, 1], [2, 4]), ([], [])], "torch refuses the last one"
    group.shutdown()


def test_a_collective_in_the_capture_of_a_graph_is_refused_and_the_group_still_works(monkeypatch, request) -> None:
    with FakeTensorMode():
        on_cuda = torch.empty(2, device="cuda")
    request.getfixturevalue("stream")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", TorchClass, raising=False)
    group = ProcessGroupNCCL(LONG)
    group.configure("", "r0", 0, 2, 1, store=dist.HashStore())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="in the capture of a CUDA graph"):
        group.allreduce([on_cuda])
    assert group.errored() is None
    group.shutdown()


def test_the_device_chooses_the_kind_of_process_group() -> None:
    kinds = {one: group_class(one) for one in ("cpu", "cuda", "xpu")}
    assert kinds == {"cpu": ProcessGroupGloo, "cuda": ProcessGroupNCCL, "xpu": ProcessGroupXCCL}


# ---- streams


class Mark:
    def __init__(self, *, passed: bool = False) -> None:
        self.passed = passed
        self.looked = threading.Event()

    def query(self) -> bool:
        self.looked.set()
        return self.passed


def test_the_work_before_an_operation_does_not_count_for_its_time() -> None:
    failed: list[Exception] = []
    over = threading.Event()

    def fail(error: Exception) -> None:
        failed.append(error)
        over.set()

    watch, begun, ended = StreamWatch(fail, lambda: None), Mark(), Mark()
    watch.add(timedelta(seconds=BACKLOG_POLL_SECONDS / 2), begun, ended)
    for _ in range(3):  # each look comes after the time of the operation
        begun.looked.clear()
        assert begun.looked.wait(DEADLINE)
    assert not failed
    begun.passed = True
    assert over.wait(DEADLINE)
    assert "timed out after" in str(failed[0])
    watch.join()


def test_a_watch_that_fails_fails_the_communicator() -> None:
    failed: list[Exception] = []
    over = threading.Event()

    def fail(error: Exception) -> None:
        failed.append(error)
        over.set()

    class Broken(Mark):
        def query(self) -> bool:
            raise MemoryError

    watch = StreamWatch(fail, lambda: None)
    watch.add(LONG, Mark(), Broken())
    assert over.wait(DEADLINE)
    assert isinstance(failed[0], MemoryError)
    watch.join()


def test_an_operation_that_passes_in_time_is_no_failure() -> None:
    watch, ended = StreamWatch(pytest.fail, lambda: None), Mark()
    watch.add(LONG, Mark(passed=True), ended)
    assert ended.looked.wait(DEADLINE)
    ended.passed = True
    watch.add(timedelta(0), Mark(passed=True), Mark(passed=True))
    watch.stop()
    watch.join()


def test_a_stream_that_an_abort_does_not_free_ends_the_process(stream, monkeypatch) -> None:
    ends: list[str] = []

    def end_process(reason: str, *, stacks: bool) -> None:
        assert stacks
        ends.append(reason)
        stream.free.set()

    monkeypatch.setattr(module, "end_process", end_process)
    monkeypatch.setattr(module, "ABORT_SECONDS", 0.0)
    made = AcceleratorCommunicator(Backend, None, dist.HashStore(), 0, 2, timedelta(seconds=0.05))
    made.connect()
    stream.free.clear()
    threading.Timer(0.05, made.fail, [ProcessGroupAbortedError("r1 was lost")]).start()  # while the stream is awaited
    made.await_stream()
    assert ends == ["an abort did not free the accelerator within 0.05 s (r1 was lost)"]
    made.close()


def test_a_forked_child_does_not_wait_for_a_stream_that_it_cannot_use(stream) -> None:
    made = communicator(Backend())
    made.connect()
    child = os.fork()
    if not child:
        stream.free.clear()  # a wait would be an AssertionError after the deadline
        made.await_stream()
        os._exit(0 if isinstance(made.error, ForkError) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    made.fail(ProcessGroupAbortedError("over"))
    made.close()


class Expecting(AcceleratorCommunicator):
    """Notes the waits for a stream, on a machine without streams."""

    def __init__(self) -> None:
        super().__init__(None, None, dist.HashStore(), 0, 1, LONG)
        self.expected: list[timedelta] = []

    def mark(self) -> Any:
        return Mark()

    def expect(self, timeout: timedelta, begun: object) -> None:  # noqa: ARG002
        self.expected.append(timeout)


def test_a_future_is_expected_from_where_torch_says_that_its_operation_is_behind() -> None:
    made, operation, tensors = Expecting(), Operation(), [torch.ones(1)]
    future = AcceleratorWork(made, operation, "allreduce", tensors).get_future()
    assert made.expected == [], "the stream that is current now is not behind the operation"
    operation.future.set_result(tensors)
    assert made.expected == [LONG]
    assert future.wait() == tensors


def test_a_future_of_an_accelerator_holds_the_error_of_its_operation() -> None:
    operation = Operation()
    future = AcceleratorWork(Expecting(), operation, "allreduce", [torch.ones(1)]).get_future()
    operation.future.set_exception(RuntimeError("unhandled system error"))
    with pytest.raises(RuntimeError, match="unhandled system error"):
        future.wait()
