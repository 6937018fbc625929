"""The accelerator of this machine: CUDA, which for torch is AMD's ROCm too, or Intel's XPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

_THREAD_LOCAL = 1
"""``cudaStreamCaptureModeThreadLocal``: only a capture of the same thread limits what it may call."""


def device_types() -> list[str]:
    """Return ``cpu``, and ``cuda`` or ``xpu`` if torch can use such a device. Apple's ``mps`` has no collectives."""
    found: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu", found.type] if found is not None and found.type in ("cuda", "xpu") else ["cpu"]


def has_accelerator() -> bool:
    """Return whether torch can use a CUDA or XPU device of this machine."""
    return len(device_types()) > 1


def generators(device_type: str) -> Any:
    """Return torch's module with the random numbers of an accelerator; None: this machine does not have it."""
    return torch.get_device_module(device_type) if device_type in device_types()[1:] else None


def refuse_capture(tensors: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError if the current stream is being captured and one of the tensors is on CUDA.

    Replays of the graph would go on with the groups of the capture.
    """
    for tensor in tensors:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a collective of keepstep was called in the capture of a CUDA graph, whose replays would reduce over "
                "the groups of the capture, and in no step: call it outside of the graph, or turn CUDA graphs off"
            )


def begin_gpu_thread(index: int | None) -> None:
    """Let this thread use the GPU beside the training thread. Call it before the first call of CUDA in the thread.

    * A thread begins with device 0. Even to ask for an event makes a context on the device of the thread, of some
      hundred MiB, which the other ranks of the machine would have on device 0 too.
    * The usual mode of the capture of a CUDA graph forbids other threads to ask for an event, and such a call ends the
      capture.

    Args:
        index: number of the device of the training thread; None: that of this thread.
    """
    if index is not None:
        torch.accelerator.set_device_index(index)
    exchange = _exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))  # an error: no GPU, hence no capture


def queued_work(device: torch.device) -> Callable[[], None]:
    """Return a function that waits, in any thread, until the current stream has done the work that it has now.

    Call it in the training thread, and the function in a thread that reads tensors of the training.
    """
    if device.type == "cpu":
        return lambda: None
    mark = torch.Event(device)
    mark.record(torch.accelerator.current_stream(device))

    def wait() -> None:
        begin_gpu_thread(device.index)
        mark.synchronize()

    return wait


@functools.cache
def _exchange_capture_mode() -> Any:
    """Return the function of the runtime that torch has loaded; None: torch has none."""
    if torch.version.cuda:
        library, name = f"libcudart.so.{torch.version.cuda.partition('.')[0]}", "cudaThreadExchangeStreamCaptureMode"
    elif torch.version.hip:
        library, name = "libamdhip64.so", "hipThreadExchangeStreamCaptureMode"
    else:
        return None
    try:
        return getattr(ctypes.CDLL(library), name)
    except (OSError, AttributeError):  # linked into torch, or of another name
        return None
