"""A manifest from a liar is a clear error before anything is allocated for it."""

from __future__ import annotations

import contextlib
import pickle
import tracemalloc

import msgpack
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep.checkpointing import ManifestError, TransferError
from keepstep.state.restoring import Destination
from keepstep.state.state_bytes import load_state, save_state
from keepstep.state.state_manifest import read_manifest
from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES, root_digest

ROW = ["float32", [4], None, 0, 0, None]


def forge(tree=("tensor", 0), rows=(ROW,), regions=(16,), digests=None, **fields):
    """A manifest whose root digest is right, whatever else it says."""
    content = fields.pop("content", None) or msgpack.packb([tree, rows, regions])
    end = 0
    for length in regions if all(type(one) is int and one >= 0 for one in regions) else ():
        end = -(-end // 64) * 64 + length
    chunks = bytes(16 * min(-(-end // (8 << 20)), 1 << 16)) if digests is None else digests
    manifest = {
        "format": "keepstep-state",
        "version": 1,
        "origin": ["", "", 0, 0, ""],
        "content": content,
        "chunk_bytes": 8 << 20,
        "chunk_digest": "xxh3-128",
        "chunks": chunks,
        "root_digest": "blake2b-256",
        "root": root_digest(content, chunks),
    }
    return msgpack.packb(manifest | fields)


def nested(levels):
    tree = ["tensor", 0]
    for _ in range(levels):
        tree = ["list", tree]
    return tree


def deep(levels):
    return b"\x91" * levels + b"\xc0"


HOSTILE = {
    "empty": (b"", "not msgpack"),
    "garbage": (b"\xff" * 100, "no keepstep manifest|not msgpack"),
    "a pickle": (pickle.dumps({"a": 1}), "no keepstep manifest|not msgpack"),
    "another map": (msgpack.packb({"a": 1}), "no keepstep manifest"),
    "too long": (bytes(MAX_MANIFEST_BYTES + 1), "too large"),
    "a newer version": (forge(version=2), "version 2; this build reads version 1"),
    "another digest": (forge(chunk_digest="md5"), "chunk_digest of the manifest is md5"),
    "chunks of one byte": (forge(chunk_bytes=1), "chunk_bytes"),
    "a wrong root": (forge(root=bytes(32)), "root digest"),
    "a missing origin": (forge(origin=None), "origin must be a list"),
    "too few digests": (forge(digests=b""), "0 bytes of chunk digests"),
    "too many digests": (forge(digests=bytes(32)), "32 bytes of chunk digests"),
    "a lying length": (forge(rows=[["float32", [5], None, 0, 0, None]]), "does not fit its region of 16 bytes"),
    "an offset beyond the region": (forge(rows=[["float32", [4], None, 0, 4, None]]), "does not fit its region"),
    "an offset that is not aligned": (forge(rows=[["float32", [1], None, 0, 2, None]]), "does not fit its region"),
    "strides beyond the region": (forge(rows=[["float32", [2], [4], 0, 0, None]]), "does not fit its region"),
    "strides of zero": (forge(rows=[["float32", [1 << 40], [0], 0, 0, None]]), "does not fit its region"),
    "a huge shape": (forge(rows=[["float32", [1 << 45, 1 << 45], None, 0, 0, None]]), "too large"),
    "a huge empty shape": (forge(rows=[["float32", [0, 1 << 45, 1 << 45], None, 0, 0, None]]), "too large"),
    "a negative shape": (forge(rows=[["float32", [-4], None, 0, 0, None]]), "must be an integer"),
    "a shape that is not one": (forge(rows=[["float32", [True], None, 0, 0, None]]), "must be an integer"),
    "too many dimensions": (forge(rows=[["float32", [1] * 100, None, 0, 0, None]]), "limit 64"),
    "a huge region": (forge(regions=[1 << 60]), "must be an integer in"),
    "regions that add up": (
        forge(
            tree=["list", ["tensor", 0], ["tensor", 1]],
            rows=[ROW, ["uint8", [0], None, 1, 0, None]],
            regions=[1 << 46] * 2,
        ),
        "pack too large",
    ),
    "more than the memory": (
        forge(rows=[["uint8", [1 << 39], None, 0, 0, None]], regions=[1 << 39]),
        "the state needs 549755813888 bytes",
    ),
    "an unknown dtype": (forge(rows=[["float99", [4], None, 0, 0, None]]), "unknown dtype"),
    "a dtype that is a list": (forge(rows=[[[], [4], None, 0, 0, None]]), "tensor 0: dtype must be str, not list"),
    "a numpy dtype of objects": (forge(rows=[["numpy:|O8", [2], None, 0, 0, None]]), "unsupported numpy dtype"),
    "a numpy dtype with fields": (forge(rows=[["numpy:i4,i4", [2], None, 0, 0, None]]), "unsupported numpy dtype"),
    "a region that is not there": (forge(rows=[["float32", [4], None, 7, 0, None]]), "region 7 of 1"),
    "a region of no tensor": (forge(regions=[16, 1 << 36]), "belongs to no tensor"),
    "a tensor without a reference": (forge(tree=None), "does not refer to every tensor"),
    "a reference beyond the table": (forge(tree=["tensor", 1]), "refers to tensor"),
    "a reference that is no number": (forge(tree=["tensor", "x"]), "refers to tensor"),
    "a reference to two": (forge(tree=["tensor", 0, 0]), "refers to tensor"),
    "a row that is too short": (forge(rows=[["float32", [4]]]), "its row has 2 fields; expected 6"),
    "an unknown kind of value": (forge(tree=["list", ["tensor", 0], ["eval", "1+1"]]), r"state\[1\] is not a value"),
    "a map in the tree": (forge(tree=["list", ["tensor", 0], {"a": 1}]), "is not a value of this format"),
    "a damaged value": (forge(tree=["list", ["tensor", 0], ["complex", "x", 1]]), r"state\[1\] is an invalid complex"),
    "an endless integer": (forge(tree=["list", ["tensor", 0], ["int", bytes(1 << 17)]]), "invalid int"),
    "a key without a value": (forge(tree=["dict", "a", ["tensor", 0], "b"]), "key without a value"),
    "a key that is there twice": (forge(tree=["dict", "a", ["tensor", 0], "a", 1]), "'a' twice"),
    "a key that is a list": (forge(tree=["dict", ["list", 1], ["tensor", 0]]), "key of state"),
    "a tensor in a set": (forge(tree=["set", ["tensor", 0]]), "element of state"),
    "deep nesting": (forge(content=b"\x93" + deep(300) + b"\x90\x90", regions=[]), "is not a value of this format"),
    "deep lists": (forge(tree=nested(100)), "nested more than 64"),
    "very deep nesting": (forge(content=b"\x93" + deep(1 << 20) + b"\x90\x90", regions=[]), "not msgpack"),
    "an array that claims a length": (forge(content=b"\x93\xc0\xdd\xff\xff\xff\xff\xc0", regions=[]), "not msgpack"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_an_error_before_memory_is_taken_for_it(name):
    manifest, words = HOSTILE[name]
    tracemalloc.start()
    try:
        with pytest.raises((ManifestError, TransferError), match=words):
            Destination(read_manifest(manifest).content)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(manifest) + (4 << 20)
    finally:
        tracemalloc.stop()


STATE = {
    "model": {"w": torch.arange(6.0).reshape(2, 3), "t": torch.arange(6.0).reshape(2, 3).t()},
    "step": 3,
    "more": (1 + 2j, torch.Size([1]), torch.bfloat16, {1, 2}, b"x" * 5000, [None, "text", 1 << 70]),
}
MANIFEST, PACK = save_state(STATE)


@settings(max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_content_under_a_right_digest_is_refused_or_harmless(changes):
    top = msgpack.unpackb(MANIFEST)
    content = bytearray(top["content"])
    for position, value in changes:
        content[position % len(content)] = value
    top["content"] = bytes(content)
    top["root"] = root_digest(top["content"], top["chunks"])
    outcome = "loaded"
    try:
        load_state(msgpack.packb(top), PACK)
    except (ManifestError, TransferError) as error:
        outcome = str(error)
    assert outcome, "an error says what is wrong"


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_damaged_manifest_is_refused(position, change):
    damaged = bytearray(MANIFEST)
    damaged[position % len(damaged)] ^= change
    with contextlib.suppress(ManifestError):
        assert load_state(bytes(damaged), PACK)["step"] == 3  # only the origin is outside the digest
