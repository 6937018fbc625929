from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from keepstep.one_copy.copies.frames import CopyError, Frames, send_state
from keepstep.one_copy.copies.kept_bytes import (
    BLOCK_BYTES,
    Memory,
    Stored,
    TensorPack,
    pack_bytes,
    pack_of,
    pack_of_gradients,
    pieces_of,
)

SECONDS = 30.0
STATE = {
    "large": torch.arange(3_000_000, dtype=torch.float32),
    "turned": torch.arange(60_000.0).reshape(200, 300).t(),
    "small": [torch.ones(3, dtype=torch.bfloat16), torch.zeros(0)],
    "text": "abc",
}


@pytest.fixture
def pair() -> Iterator[tuple[Frames, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield Frames(one), other


def sent(pair: tuple[Frames, socket.socket], damage: int | None = None) -> bytes:
    """Return the bytes of ``STATE`` on a connection, one of them perhaps changed."""
    data = bytearray()

    def read() -> None:
        while part := pair[1].recv(1 << 20):
            data.extend(part)

    thread = threading.Thread(target=read)
    thread.start()
    send_state([pair[0]], {"kind": "slice"}, STATE, limit=SECONDS)
    pair[0].close()
    thread.join()
    if damage is not None:
        data[damage] ^= 1
    return bytes(data)


def received(data: bytes, memory: Memory | None) -> Any:
    one, other = socket.socketpair()
    with one, other:
        thread = threading.Thread(target=other.sendall, args=(data,))
        thread.start()
        frames = Frames(one)
        try:
            header = frames.receive(SECONDS)
            if memory is None:
                return frames.receive_state(header, SECONDS)
            return frames.receive_stored(header, memory, SECONDS)
        finally:
            frames.close()
            thread.join()


def assert_equal(found: Any) -> None:
    assert found["text"] == "abc"
    for one, other in zip([found["large"], found["turned"], *found["small"]], tensors(), strict=True):
        assert torch.equal(one, other)


def tensors() -> list[torch.Tensor]:
    return [STATE["large"], STATE["turned"], *STATE["small"]]  # type: ignore[list-item]


def test_a_state_of_several_chunks_arrives_in_memory_of_its_own_and_in_blocks(
    pair: tuple[Frames, socket.socket],
) -> None:
    data = sent(pair)
    assert_equal(received(data, None))
    stored = received(data, Memory())
    assert_equal(stored.state())
    assert stored.nbytes == pytest.approx(sum(one.nbytes for one in tensors()), rel=0.01)


def test_bytes_that_were_damaged_on_their_way_are_refused(pair: tuple[Frames, socket.socket]) -> None:
    data, memory = sent(pair, damage=9_000_000), Memory()
    with pytest.raises(CopyError, match="damaged on its way"):
        received(data, None)
    with pytest.raises(CopyError, match="damaged on its way"):
        received(data, memory)
    assert memory.free_bytes > 0, "its blocks are used again"


def test_blocks_are_used_again_when_nobody_reads_them() -> None:
    memory = Memory()
    first = Stored.of({"a": torch.ones(BLOCK_BYTES)}, memory)
    assert memory.free_bytes == 0
    reader = first
    del first
    assert memory.free_bytes == 0
    assert torch.equal(reader.state()["a"], torch.ones(BLOCK_BYTES))
    del reader
    free = memory.free_bytes
    assert free == 4 * BLOCK_BYTES
    second = Stored.of({"a": torch.zeros(BLOCK_BYTES)}, memory)
    assert memory.free_bytes == 0
    assert torch.equal(second.state()["a"], torch.zeros(BLOCK_BYTES))


def test_gradients_are_described_as_other_states_are() -> None:
    """Their pieces lie in their own memory, also those that share a storage as the gradients of FSDP2 do."""
    flat = torch.arange(40, dtype=torch.float32)
    gradients = {
        "odd": torch.ones(3, 5, dtype=torch.bfloat16),
        "none": torch.empty(0),
        "number": torch.tensor(2.0),
        "large": torch.randn(70, 70),
    }
    pack, whole = pack_of_gradients(gradients), pack_of(gradients)
    assert isinstance(pack, TensorPack)
    assert pack.content_bytes == whole.content_bytes
    assert b"".join(pieces_of(pack)) == b"".join(pieces_of(whole))
    assert any(np.frombuffer(one, np.uint8).ctypes.data == gradients["large"].data_ptr() for one in pack.pieces)
    shared = {"a": flat[:20], "b": flat[20:]}
    assert pack_bytes(pack_of_gradients(shared).content_bytes) == 128 + 80
    assert b"".join(pieces_of(pack_of_gradients(shared))) == b"".join(pieces_of(pack_of(shared)))
    turned = pack_of_gradients({"turned": torch.randn(4, 6).t()})
    assert not isinstance(turned, TensorPack)
