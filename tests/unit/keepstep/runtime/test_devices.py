"""The accelerator that torch finds, and threads beside the capture of a CUDA graph."""

from __future__ import annotations

import ctypes
import queue
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses import FakeTensorMode

from keepstep.process_group.baby import child as child_module
from keepstep.process_group.baby.child import Child
from keepstep.process_group.torch_backends.accelerator import AcceleratorCommunicator
from keepstep.process_group.torch_backends.stream_watch import StreamWatch
from keepstep.runtime import devices
from keepstep.runtime.devices import begin_gpu_thread, device_types, generators, queued_work
from keepstep.state.device_copies import device_copies

DEADLINE = 60.0


@pytest.mark.parametrize(
    ("available", "compiled_for", "types"),
    [
        (True, "cuda", ["cpu", "cuda"]),
        (True, "xpu", ["cpu", "xpu"]),
        (True, "mps", ["cpu"]),
        (False, "cuda", ["cpu"]),
        (False, None, ["cpu"]),
    ],
)
def test_the_accelerator_counts_if_this_machine_has_one(monkeypatch, available, compiled_for, types) -> None:
    found = None if compiled_for is None else torch.device(compiled_for)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: available)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: found)
    assert device_types() == types
    assert generators("cpu") is None
    assert (generators("xpu") is torch.xpu) == ("xpu" in types)


class Capture:
    """Notes the threads that ignore captures, in the place of the runtime of the GPU."""

    def __init__(self) -> None:
        self.ignoring: set[int] = set()

    def exchange(self, mode: Any) -> int:
        assert ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value == 1, "cudaStreamCaptureModeThreadLocal"
        self.ignoring.add(threading.get_ident())
        return 0

    def forbids(self) -> bool:
        """Whether this call would end the capture that the main thread makes."""
        return threading.get_ident() not in self.ignoring


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    made = Capture()
    monkeypatch.setattr(devices, "_exchange_capture_mode", lambda: made.exchange)
    return made


def test_the_watch_of_a_stream_ends_no_capture(capture: Capture) -> None:
    asked, failed = threading.Event(), []

    class Mark:
        def query(self) -> bool:
            if threading.current_thread() is not threading.main_thread():
                failed.append(capture.forbids())
                asked.set()
            return False

    watch = StreamWatch(lambda _error: None, lambda: begin_gpu_thread(None))
    watch.add(timedelta(seconds=1000), Mark(), Mark())
    assert asked.wait(DEADLINE)
    watch.stop()
    watch.join()
    assert not any(failed), "cudaEventQuery of another thread ends a capture in the usual mode"


def test_the_threads_that_empty_pinned_buffers_end_no_capture(capture: Capture) -> None:
    failed = []

    class Copies:
        """Those of a device whose memory is main memory."""

        def __init__(self, _device: torch.device) -> None: ...

        def flat(self, source: torch.Tensor) -> torch.Tensor:
            return source.view(torch.uint8)

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source)

        def mark(self) -> Copies:
            return self

        def synchronize(self) -> None:
            failed.append(capture.forbids())

    target, source = torch.zeros(4096, dtype=torch.uint8), torch.arange(1024, dtype=torch.int32)
    with device_copies(Copies, lambda: torch.empty(512, dtype=torch.uint8)) as copy:
        copy(target, source)
    assert torch.equal(target.view(torch.int32), source)
    assert failed
    assert not any(failed)


@pytest.mark.skipif(not torch.version.cuda, reason="needs a torch build with CUDA")
def test_the_runtime_that_torch_has_loaded_has_the_function() -> None:
    """With or without a GPU: without one it returns an error, which means nothing."""
    assert devices._exchange_capture_mode() is not None
    begin_gpu_thread(None)


def test_a_build_without_gpus_has_nothing_to_ignore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices._exchange_capture_mode.__wrapped__() is None
    monkeypatch.setattr(torch.version, "hip", "0.0")
    assert devices._exchange_capture_mode.__wrapped__() is None, "no such library here"


class Gpus:
    """GPUs of a machine, for a process whose training thread uses number 3. Each thread begins with number 0."""

    def __init__(self) -> None:
        self._current = threading.local()
        self.waited: list[tuple[str, int]] = []
        """Name of the thread and number of the device, for each wait for a mark."""

    def set_device_index(self, index: int) -> None:
        self._current.index = index

    def current_device_index(self) -> int:
        return getattr(self._current, "index", 0)

    def query(self) -> bool:
        """Of a mark."""
        self.synchronize()
        return False

    def synchronize(self) -> None:
        """Of a mark. In CUDA even this makes a context on the current device of the thread."""
        self.waited.append((threading.current_thread().name, self.current_device_index()))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    made = Gpus()
    made.set_device_index(3)
    monkeypatch.setattr(torch.accelerator, "set_device_index", made.set_device_index)
    monkeypatch.setattr(torch.accelerator, "current_device_index", made.current_device_index)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: ("stream", device))
    return made


def test_the_thread_that_waits_for_queued_work_uses_the_gpu_of_the_training(gpus: Gpus, monkeypatch) -> None:
    recorded = []

    class Event:
        synchronize = gpus.synchronize

        def __init__(self, device: torch.device) -> None:
            self.device = device

        def record(self, stream: object) -> None:
            recorded.append((stream, self.device))

    monkeypatch.setattr(torch, "Event", Event)
    device = torch.device("cuda", 3)
    wait = queued_work(device)
    assert recorded == [(("stream", device), device)]
    thread = threading.Thread(target=wait, name="reader")
    thread.start()
    thread.join(DEADLINE)
    assert gpus.waited == [("reader", 3)]
    queued_work(torch.device("cpu"))()
    assert len(recorded) == 1


def test_the_watch_of_a_communicator_uses_its_gpu(gpus: Gpus, monkeypatch) -> None:
    watched = threading.Event()

    class Mark:
        def query(self) -> bool:
            gpus.query()
            if threading.current_thread() is not threading.main_thread():
                watched.set()
            return False

    monkeypatch.setattr(AcceleratorCommunicator, "_connect", lambda *_: None)
    monkeypatch.setattr(AcceleratorCommunicator, "mark", lambda _self: Mark())
    communicator = AcceleratorCommunicator(None, None, dist.HashStore(), 0, 2, timedelta(seconds=1000))
    communicator.connect()
    communicator.expect(timedelta(seconds=1000), Mark())  # type: ignore[arg-type]
    assert watched.wait(DEADLINE)
    communicator._watch.stop()
    communicator._watch.join()
    assert {index for _, index in gpus.waited} == {3}


def test_the_threads_that_empty_pinned_buffers_use_the_gpu_of_their_tensors(gpus: Gpus) -> None:
    class Copies:
        synchronize = gpus.synchronize

        def __init__(self, _device: torch.device) -> None: ...

        def flat(self, source: torch.Tensor) -> torch.Tensor:
            return torch.zeros(source.nbytes, dtype=torch.uint8)

        def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
            target.copy_(source)

        def mark(self) -> Copies:
            return self

    with FakeTensorMode(allow_non_fake_inputs=True):
        source = torch.empty(1024, device="cuda:3")
    with device_copies(Copies, lambda: torch.empty(512, dtype=torch.uint8)) as copy:
        copy(torch.zeros(4096, dtype=torch.uint8), source)
    assert gpus.waited
    assert {index for _, index in gpus.waited} == {3}


def test_a_child_answers_when_the_gpu_of_the_group_has_done_the_operation(gpus: Gpus, monkeypatch) -> None:
    """A wait for GPU 0 would let the parent read a result that is not there yet."""
    answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    class Group:
        def configure(self, *_args: object, **_options: object) -> None: ...

        def errored(self) -> None:
            gpus.synchronize()

    class Channel:
        send = answers.put

    class Call:
        def wait(self) -> bool:
            return True

        def copy_results(self) -> None: ...

    monkeypatch.setitem(child_module.BACKENDS, "nccl", lambda _timeout: Group())
    child: Any = Child(Channel())  # type: ignore[arg-type]
    begun = {"id": 1, "backend": "nccl", "device": 3, "store_host": "", "store_version": 1, "timeout": 60, "host": None}
    child._configure({**begun, "args": []}, [])
    assert answers.get(timeout=DEADLINE)["error"] is None
    gpus.waited.clear()
    thread = threading.Thread(target=child._wait_for_device, args=({"id": 2}, Call(), Call()), name="waiting")
    thread.start()
    thread.join(DEADLINE)
    assert answers.get(timeout=DEADLINE)["error"] is None
    assert gpus.waited
    assert set(gpus.waited) == {("waiting", 3)}
