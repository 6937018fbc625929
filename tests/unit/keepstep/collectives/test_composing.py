"""The stream that a quantized collective uses instead of the current one."""

from __future__ import annotations

import pytest
import torch

from keepstep.collectives.composing import on_stream

LONG = 100_000_000
"""Cycles, tens of milliseconds."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_waits_for_the_work_that_is_queued_on_the_current_one():
    tensor = torch.zeros(10, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda._sleep(LONG)
    tensor.add_(1)
    with on_stream(stream):
        copy = tensor.clone()
    stream.synchronize()
    assert copy.tolist() == [1.0] * 10
