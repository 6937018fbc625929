"""Memory that the processes of a relay share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.tiers.memory_tier import MemoryTier
from keepstep_relay.tiers.shared_slots import SharedSlots, place_of


@pytest.fixture
def slots() -> Iterator[SharedSlots]:
    with contextlib.closing(SharedSlots(2)) as one:
        yield one


def allocated(slots: SharedSlots) -> int:
    return os.fstat(slots.descriptor).st_blocks * 512


def test_another_process_sees_the_bytes_at_their_place(slots: SharedSlots) -> None:
    data = slots.take()
    assert data is not None
    data[100:105] = b"bytes"
    place = place_of(data[100:105])
    assert place is not None
    assert place.start == 100
    with contextlib.closing(SharedSlots(2, os.dup(slots.descriptor))) as other:
        assert other.view(place.slot, lambda: None)[100:105] == b"bytes"
    assert place_of(memoryview(bytearray(5))) is None


def test_a_slot_is_free_when_its_last_buffer_is_gone(slots: SharedSlots) -> None:
    one, two = slots.take(), slots.take()
    assert one is not None
    assert slots.take() is None
    sending = one[5:10]
    del one
    assert slots.take() is None
    del sending
    assert slots.take() is not None
    del two


async def test_the_memory_of_free_slots_goes_back_to_the_kernel(slots: SharedSlots) -> None:
    memory = MemoryTier(2 * CHUNK_BYTES, lambda _: None)
    memory.slots = slots

    async def fill(digest: bytes) -> None:
        await memory.reserve(CHUNK_BYTES, 0)
        data = memory.buffer(CHUNK_BYTES)
        data[:] = bytes([1]) * CHUNK_BYTES
        memory.put(digest, data)

    for digest in (b"1", b"2"):
        await fill(digest)
    memory.drop(b"1")
    await fill(b"3")
    assert allocated(slots) == 2 * CHUNK_BYTES  # used again
    memory.drop(b"2")
    await memory.reserve(1000, 0)
    assert allocated(slots) == CHUNK_BYTES
