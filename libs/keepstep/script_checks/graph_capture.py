"""Refuse a collective in the capture of a CUDA graph: replays would go on with the groups of the capture."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def refuse_capture(tensors: Iterable[torch.Tensor]) -> None:
    """Raise RuntimeError if the current stream is being captured and one of the tensors is on CUDA."""
    for tensor in tensors:
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a collective of the Manager was called in the capture of a CUDA graph, whose replays would reduce "
                "over the groups of the capture, and in no step: call it outside of the graph, or turn CUDA graphs off"
            )
