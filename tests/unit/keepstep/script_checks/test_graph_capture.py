"""Collectives in the capture of a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from keepstep import Manager
from keepstep.runtime.devices import refuse_capture


def test_a_collective_in_the_capture_of_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        on_cuda = torch.empty(2, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    manager: Any = None  # the check comes before anything of the Manager
    with pytest.raises(RuntimeError, match="in the capture of a CUDA graph"):
        Manager.allreduce(manager, on_cuda)
    with pytest.raises(RuntimeError, match="in the capture of a CUDA graph"):
        Manager.run_collective(manager, [torch.empty(2), on_cuda], manager)
    refuse_capture([torch.empty(2)])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    refuse_capture([on_cuda])
