"""Reads of parts of packs: which bytes are read, where they arrive, and that each of them is verified."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgpack
import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointDamaged, StoredCheckpoint
from keepstep.checkpoint.loading import load_leaves
from keepstep.checkpoint.places.directory import DirectorySource
from keepstep.checkpoint.reading import VerifiedReader, Wanted
from keepstep.checkpoint.saving import pack_of
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import (
    CHUNK_BYTES,
    MIN_PART_BYTES,
    Origin,
    PackHasher,
    chunk_digest,
    pack_envelope,
    part_size,
    read_envelope,
)
from keepstep_mesh.protocol.stored_keys import FORMAT
from tests.support.checkpoints.sharded_worlds import parts_of
from tests.support.services.relay_driver import flip

ROWS, COLUMNS = 2400, 1000
"""9.6 MB: two chunks, and borders that are borders of no part."""


@cache
def values():
    return torch.rand(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))


class CountingSource(DirectorySource):
    """Counts the bytes of each range that it fetches."""

    def __init__(self, path):
        super().__init__(path)
        self.fetched = Counter()

    def fetch(self, rank, offset, length, receive):
        self.fetched[rank, offset] += length
        super().fetch(rank, offset, length, receive)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    place = tmp_path_factory.mktemp("saved") / "c"
    checkpoint.save({"w": values()}, place)
    return place


@pytest.fixture
def copied(saved, tmp_path):
    """A copy that the test may change."""
    return Path(shutil.copytree(saved, tmp_path / "c"))


def test_a_quarter_of_a_shard_is_a_quarter_of_the_bytes(saved):
    source = CountingSource(saved)
    stored = StoredCheckpoint(VerifiedReader(source))
    state = {"w": torch.zeros(ROWS // 4, COLUMNS)}
    stored.tensors["w"].shape = (ROWS // 4, COLUMNS)  # as for a rank of four
    load_leaves(state, stored, strict=True)
    assert state["w"].equal(values()[: ROWS // 4])
    assert state["w"].nbytes <= source.fetched.total() < state["w"].nbytes + MIN_PART_BYTES


def test_any_ranges_are_read_exactly_and_no_part_twice(saved):
    pack = (saved / "pack-0").read_bytes()
    choose = random.Random(0)
    for _ in range(10):
        source = CountingSource(saved)
        reader = VerifiedReader(source)
        reader.manifests()
        cuts = sorted(choose.choices(range(len(pack)), k=12))
        ranges = [(a, b) for a, b in pairwise(cuts) if a < b and choose.random() < 0.6]
        ranges += [(cuts[2], cuts[5]), (len(pack) - 1, len(pack))]  # which overlaps others; and the last byte
        memories, done = [bytearray(b - a) for a, b in ranges], []
        reader.read_all(
            [
                Wanted("w", 0, a, b - a, memoryview(memory) if choose.random() < 0.7 else None, done.append)
                for (a, b), memory in zip(ranges, memories, strict=True)
            ]
        )
        assert sorted(map(bytes, done)) == sorted(pack[a:b] for a, b in ranges)
        parts = {part for a, b in ranges for part in range(a // MIN_PART_BYTES, (b - 1) // MIN_PART_BYTES + 1)}
        whole = sum(min(len(pack), (part + 1) * MIN_PART_BYTES) - part * MIN_PART_BYTES for part in parts)
        assert source.fetched.total() == whole


def test_a_damaged_part_is_named_if_it_is_read_and_only_then(copied):
    flip(copied / "pack-0")  # in the middle, which is in chunk 0
    reader = checkpoint.open_reader(copied)
    reader.manifests()
    assert bytes(reader.read(0, 0, 100)) == (copied / "pack-0").read_bytes()[:100]
    with pytest.raises(CheckpointDamaged, match=r"^chunk 0 of .*/pack-0 is damaged"):
        reader.read(0, 0, CHUNK_BYTES)
    with pytest.raises(CheckpointDamaged, match=r"^w was not loaded: chunk 0 of .*/pack-0 is damaged"):
        checkpoint.load({"w": torch.zeros(ROWS, COLUMNS)}, copied)


def test_small_reads_share_the_parts_that_they_have_read(saved):
    source = CountingSource(saved)
    stored = StoredCheckpoint(VerifiedReader(source))
    for offset in range(0, 100_000, 1000):
        stored.reader.read(0, offset, 1000)
    assert source.fetched == {(0, 0): MIN_PART_BYTES}


def test_a_manifest_without_parts_is_read_by_whole_chunks(copied):
    manifest = copied / "manifest-0"
    older = msgpack.unpackb(manifest.read_bytes())
    del older["parts"]
    manifest.write_bytes(msgpack.packb(older))
    source = CountingSource(copied)
    stored = StoredCheckpoint(VerifiedReader(source))
    assert stored.tensor("w").equal(values())
    source.fetched.clear()
    stored.reader.read(0, 5, 10)
    assert source.fetched == {(0, 0): CHUNK_BYTES}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([MIN_PART_BYTES], "too few fields"),
        ([MIN_PART_BYTES - 1, b"", b""], "size of a part is 262143"),
        ([3 << 20, b"", b""], "expected a divisor of 8388608"),
        ([1 << 20, b"", b""], "0 bytes of digests of parts do not fit a pack of"),
        ([MIN_PART_BYTES, None, b""], "damaged on their way"),
    ],
)
def test_damaged_parts_of_a_manifest_are_refused(saved, parts, message):
    manifest = msgpack.unpackb((saved / "manifest-0").read_bytes())
    manifest["parts"] = [manifest["parts"][1][::-1] if one is None else one for one in parts]
    with pytest.raises(ManifestError, match=message):
        read_envelope(msgpack.packb(manifest))


EMPTY = ["dict"]
TREE = {"format": FORMAT, "tensors": EMPTY, "objects": EMPTY, "paths": EMPTY}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tensors": None}, "the tree of rank 0 has no dict of tensors: the manifest is damaged"),
        ({"objects": None}, "has no dict of objects"),
        ({"paths": None}, "has no dict of paths"),
        ({"objects": ["list"]}, "has no dict of objects"),
        ({"objects": ["dict", 3, 4]}, "objects of rank 0 has the key '3', expected a string"),
        ({"objects": ["dict", ["list", 1], 4]}, "objects of rank 0 has a key that cannot be one"),
        ({"objects": ["dict", "k"]}, "objects of rank 0 has a key without a value"),
        ({"tensors": ["dict", "w", ["list"]]}, "tensor w has no shard"),
        ({"tensors": ["dict", "w", []]}, "expected a tensor"),
        ({"tensors": ["dict", "w", 5]}, "expected a tensor"),
        ({"paths": ["dict", "w", 5]}, "path of w is 5, expected a tuple"),
    ],
)
def test_a_damaged_tree_is_refused_by_name(change, message):
    pairs = [item for name, node in (TREE | change).items() if node is not None for item in (name, node)]
    content = msgpack.packb([["dict", *pairs], [], []])

    class Reader:
        def manifests(self):
            return [pack_envelope(Origin(), content, b"")]

    with pytest.raises(ManifestError, match=message):
        StoredCheckpoint(Reader())


def test_large_packs_have_larger_parts():
    assert [part_size(size) for size in (0, 64 << 30, (64 << 30) + 1, 1 << 46)] == [
        MIN_PART_BYTES,
        MIN_PART_BYTES,
        2 * MIN_PART_BYTES,
        CHUNK_BYTES,
    ]
    hasher = PackHasher(0)
    assert (hasher.digests, hasher.parts.digests) == (b"", b"")


@pytest.mark.parametrize("kind", ["transposed", "other dtype", "every second row", "tied"])
def test_tensors_that_do_not_have_the_bytes_as_stored_are_loaded_too(tmp_path, kind):
    saved = {"w": values(), "v": values().flip(0)}
    checkpoint.save(saved, tmp_path / "c")
    memory = torch.zeros(2 * ROWS, COLUMNS)
    targets = {
        "transposed": {"w": torch.zeros(COLUMNS, ROWS).t(), "v": torch.zeros(ROWS, COLUMNS)},
        "other dtype": {"w": torch.zeros(ROWS, COLUMNS, dtype=torch.float64), "v": torch.zeros(ROWS, COLUMNS)},
        "every second row": {"w": memory[::2], "v": memory[1::2]},
        "tied": {"w": memory[:ROWS], "v": memory[:ROWS]},
    }[kind]
    checkpoint.load(targets, tmp_path / "c")
    if kind == "tied":
        assert ((memory[:ROWS] == saved["w"]) | (memory[:ROWS] == saved["v"])).all()
    else:
        assert all(targets[key].to(torch.float32).equal(saved[key]) for key in saved)


def test_a_load_into_a_tensor_that_a_backward_pass_needs_is_noticed(saved):
    weight = torch.nn.Parameter(torch.ones(ROWS, COLUMNS))
    result = (weight * weight).sum()
    checkpoint.load({"w": weight}, saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_the_chunks_of_a_pack_do_not_depend_on_its_parts():
    pack = pack_of(parts_of({"w": values()}))
    whole = b"".join(bytes(pack.chunk(number)) for number in range(pack.chunks))
    assert pack.digests().digests == b"".join(
        chunk_digest(whole[start : start + CHUNK_BYTES]) for start in range(0, len(whole), CHUNK_BYTES)
    )
