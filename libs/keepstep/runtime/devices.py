"""The accelerator of this machine: CUDA, which for torch is AMD's ROCm too, or Intel's XPU."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable
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


def ignore_captures() -> None:
    """Let this thread use the GPU while another one captures a CUDA graph.

    The usual mode of a capture forbids other threads even to ask for an event, and such a call ends the capture. Call
    it at the begin of each thread that uses the GPU beside a training thread.
    """
    exchange = _exchange_capture_mode()
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))  # an error: no GPU, hence no capture


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
