"""The file of a pack: written from pieces of memory, hashed on the way, and synced unless it is not wanted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint.places import pack_file
from keepstep.checkpoint.places.pack_file import write_pack
from keepstep.state.pack import Pack
from keepstep.state.pack_layout import describe
from keepstep.state.state_bytes import save_state
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, PackHasher, cut_pieces


def test_a_pack_of_many_tensors_is_written_and_hashed_as_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_file, "WRITEBACK_BYTES", 1 << 20)
    sizes = [*range(1, 300), 100_001, 0, CHUNK_BYTES + 77, 5, 64, 3 * CHUNK_BYTES // 2]
    pack = Pack(describe([torch.full((size,), size % 251, dtype=torch.uint8) for size in sizes]))
    hasher = write_pack(pack, tmp_path / "pack", lambda: None, sync=True)
    written, expected = (tmp_path / "pack").read_bytes(), PackHasher(pack.nbytes)
    assert len(written) == pack.nbytes
    for number in range(pack.chunks):
        chunk = memoryview(written)[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
        assert chunk == pack.chunk(number)
        expected.add((chunk,))
    assert (hasher.digests, hasher.parts) == (expected.digests, expected.parts)


def test_pieces_are_cut_into_parts_of_one_size() -> None:
    pieces = [memoryview(b"ab"), memoryview(b"cdefg"), memoryview(b""), memoryview(b"h")]
    parts = [[bytes(piece) for piece in part] for part in cut_pieces(pieces, 3)]
    assert parts == [[b"ab", b"c"], [b"def"], [b"g", b"h"]]


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = os.writev
    monkeypatch.setattr(os, "writev", lambda file, pieces: usual(file, [pieces[0][:1000]]))
    pack = Pack(describe([torch.arange(5000), torch.ones(300)]))
    write_pack(pack, tmp_path / "pack", lambda: None, sync=False)
    assert (tmp_path / "pack").read_bytes() == pack.chunk(0)


def test_a_save_without_sync_waits_for_no_disk_and_can_be_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    (tmp_path / "c").mkdir()
    checkpoint.save({"w": torch.arange(3000)}, tmp_path / "c", sync=False)
    assert not synced
    into = {"w": torch.zeros(3000, dtype=torch.int64)}
    checkpoint.load(into, tmp_path / "c")
    assert into["w"].equal(torch.arange(3000))
    checkpoint.save({"w": torch.ones(3)}, tmp_path / "d")
    assert synced


def test_chunks_that_are_read_in_any_order_have_the_bytes_that_a_copy_of_the_state_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("keepstep.state.pack.KEPT_BYTES", 0)  # the copies of tensors with gaps are made again
    large = torch.arange(6 << 20).to(torch.float32)
    state = [
        large[::2],
        torch.arange(30)[::3],
        large[:99].reshape(9, 11).t(),
        torch.ones(1).expand(7),
        torch.empty(0, 2),
    ]
    state += [np.arange(5), b"x" * 5000, *(large[start::5] for start in range(5))]
    _, expected = save_state(state)
    pack = Pack(describe(state))
    chunks = {number: bytes(pack.chunk(number)) for number in (*reversed(range(pack.chunks)), *range(pack.chunks))}
    assert b"".join(chunks[number] for number in range(pack.chunks)) == bytes(expected)
