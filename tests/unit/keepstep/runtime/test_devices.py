"""The accelerator that torch finds, and threads beside the capture of a CUDA graph."""

from __future__ import annotations

import ctypes
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch

from keepstep.process_group.torch_backends.stream_watch import StreamWatch
from keepstep.runtime import devices
from keepstep.runtime.devices import device_types, generators, ignore_captures
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

    watch = StreamWatch(lambda _error: None)
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
    ignore_captures()


def test_a_build_without_gpus_has_nothing_to_ignore(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    assert devices._exchange_capture_mode.__wrapped__() is None
    monkeypatch.setattr(torch.version, "hip", "0.0")
    assert devices._exchange_capture_mode.__wrapped__() is None, "no such library here"
