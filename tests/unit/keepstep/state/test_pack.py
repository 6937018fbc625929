"""The pack of a state on a device: other threads read it, whose streams follow no other stream."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepstep.state.pack import Pack
from keepstep.state.pack_layout import PackLayout, describe


def test_a_pack_waits_for_the_stream_that_writes_its_tensors_before_other_threads_read_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    of_cpu: Any = describe({"a": torch.zeros(4), "b": torch.zeros(8)})
    Pack(of_cpu)
    assert not waited
    there = [torch.empty(one.shape, device="meta") for one in of_cpu.sources]  # stands for a device
    Pack(PackLayout(of_cpu.content, there))
    assert waited == [torch.device("meta")], "once for each device"
