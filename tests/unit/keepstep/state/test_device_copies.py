"""Copies through pinned buffers, with a device that copies as late as it may."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from keepstep.state import device_copies as module
from keepstep.state.device_copies import device_copies

BUFFER_BYTES = 10


class LateDevice:
    """Copies nothing before a thread waits for the event that follows the copy."""

    fails_at = -1

    def __init__(self, _device: torch.device) -> None:
        self._queued: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._lock = threading.Lock()
        self.marks = 0

    def flat(self, source: torch.Tensor) -> torch.Tensor:
        return source.reshape(-1).view(torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queued.append((target, source))

    def mark(self) -> Any:
        self.marks += 1
        queued, self._queued = self._queued, []
        return LateMark(queued, fails=self.marks == self.fails_at)


class LateMark:
    def __init__(self, queued: list[tuple[torch.Tensor, torch.Tensor]], *, fails: bool) -> None:
        self._queued, self._fails = queued, fails

    def synchronize(self) -> None:
        if self._fails:
            raise RuntimeError("an illegal memory access was encountered")
        for target, source in self._queued:
            target.numpy()[:] = source.numpy()


@pytest.fixture
def buffers() -> list[torch.Tensor]:
    return []


@pytest.fixture
def copies(buffers):
    def allocate() -> torch.Tensor:
        buffers.append(torch.zeros(BUFFER_BYTES, dtype=torch.uint8))
        return buffers[-1]

    return lambda device=LateDevice: device_copies(device, allocate)


def test_every_byte_arrives_whatever_the_sizes_and_the_memory_is_bounded(copies, buffers) -> None:
    sources = [torch.randint(256, (size,), dtype=torch.uint8) for size in (1, 3, 10, 0, 25, 7, 400, 2)]
    whole = torch.zeros(sum(len(one) for one in sources), dtype=torch.uint8)
    with copies() as copy:
        for target, source in zip(whole.split([len(one) for one in sources]), sources, strict=True):
            copy(target, source)
    assert torch.equal(whole, torch.cat(sources))
    assert len(buffers) == module.BUFFERS


def test_small_tensors_share_a_buffer_and_a_tensor_with_gaps_arrives_in_order(copies, buffers) -> None:
    source = torch.arange(6, dtype=torch.uint8).reshape(3, 2)[:, 0]
    target = torch.zeros(3, dtype=torch.uint8)
    other = torch.zeros(4, dtype=torch.uint8)
    with torch.inference_mode(), copies() as copy:
        copy(target, source)
        copy(other, torch.tensor([1.5]))
    assert target.tolist() == [0, 2, 4]
    assert other.view(torch.float32).item() == 1.5
    assert len(buffers) == 1


def test_an_error_of_the_device_is_raised_and_no_thread_writes_afterwards(copies) -> None:
    class Broken(LateDevice):
        fails_at = 3

    before = threading.active_count()
    with pytest.raises(RuntimeError, match="illegal memory access"), copies(Broken) as copy:
        copy(torch.zeros(500, dtype=torch.uint8), torch.ones(500, dtype=torch.uint8))
    assert threading.active_count() == before
