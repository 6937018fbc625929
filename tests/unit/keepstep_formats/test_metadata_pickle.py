"""``.metadata`` of torch.distributed.checkpoint is read without unpickling, and a hostile one is refused by name."""

from __future__ import annotations

import contextlib
import copyreg
import os
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as OldTensorProperties
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from keepstep_formats.dcp_metadata import ByteRange, read_dcp_metadata
from keepstep_formats.foreign_errors import ForeignCheckpointError, RefusedClass
from keepstep_formats.metadata_pickle import read_metadata_pickle
from keepstep_mesh.protocol.boxes import Box
from keepstep_mesh.protocol.stored_keys import Index


def metadata(**changed: Any) -> Metadata:
    """A tensor ``a.w`` of shape (4, 3) in two shards, and another value in a list."""
    halves = [ChunkStorageMetadata(torch.Size([row, 0]), torch.Size([2, 3])) for row in (0, 2)]
    properties = TensorProperties(dtype=torch.bfloat16, memory_format=torch.channels_last)
    known: dict[str, Any] = {
        "state_dict_metadata": {
            "a.w": TensorStorageMetadata(properties, torch.Size([4, 3]), halves),
            "b.0": BytesStorageMetadata(),
        },
        "planner_data": {"a.w": ("a", "w"), "b.0": ("b", 0)},
        "storage_data": {
            MetadataIndex("a.w", [0, 0], 0): _StorageInfo("__0_0.distcp", 0, 100),
            MetadataIndex("a.w", [2, 0], 1): _StorageInfo("__1_0.distcp", 7, 100),
            MetadataIndex("b.0"): _StorageInfo("__0_0.distcp", 100, 5),
        },
        "storage_meta": StorageMeta(Path("/where/it/was"), "save-1"),
        "version": "1.0.0",
    }
    return Metadata(**(known | changed))


def read(tmp_path: Path, value: Any) -> Any:
    (tmp_path / ".metadata").write_bytes(value if type(value) is bytes else pickle.dumps(value))
    return read_dcp_metadata(tmp_path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_torch_is_read_with_every_protocol_of_pickle(tmp_path: Path, protocol: int) -> None:
    found = read(tmp_path, pickle.dumps(metadata(), protocol))
    tensor = found.tensors["a.w"]
    assert (tensor.dtype, tensor.shape) == (torch.bfloat16, (4, 3))
    assert tensor.shards[Box((2, 0), (2, 3))] == ByteRange("__1_0.distcp", 7, 100)
    assert found.objects == {"b.0": ByteRange("__0_0.distcp", 100, 5)}
    assert found.paths == {"a.w": ("a", "w"), "b.0": ("b", Index(0))}


def test_metadata_of_older_versions_is_read(tmp_path: Path) -> None:
    old = metadata(planner_data=None)
    old.state_dict_metadata["a.w"].properties = OldTensorProperties(dtype=torch.float16)
    del old.storage_meta, old.version  # as torch 2.0 to 2.2 have it
    for where in old.storage_data.values():
        del where.transform_descriptors
    found = read(tmp_path, old)
    assert found.tensors["a.w"].dtype is torch.float16
    assert found.paths["a.w"] == ("a.w",)


def test_metadata_with_the_strides_of_torch_2_15_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = TensorProperties(dtype=torch.bfloat16).__getstate__()[:5]
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda _: (*before, (3, 1)))
    assert read(tmp_path, metadata()).tensors["a.w"].dtype is torch.bfloat16


def test_attributes_that_other_programs_add_are_ignored(tmp_path: Path) -> None:
    extended = metadata()
    extended.mcore_data = {"a.w": {"nd_reformulated_orig_global_shape": (4, 3)}}  # Megatron Core does
    assert set(read(tmp_path, extended).tensors) == {"a.w"}


class _Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class _Keeps:
    """A value of a class of its own, without a call."""


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (_Calls(os.system, "false"), "posix.system"),
        (_Calls(eval, "1"), "builtins.eval"),
        (_Calls(getattr, "x", "upper"), "builtins.getattr"),
        (_Calls(torch.load, "x"), "torch.serialization.load"),
        (_Calls(torch.Tensor, 5), "torch.Tensor"),
        (_Keeps(), "_Keeps"),
    ],
)
def test_a_class_that_is_not_of_dcp_is_refused_by_name(tmp_path: Path, value: Any, name: str) -> None:
    for hostile in (value, metadata(version=value), metadata(planner_data={"a.w": value})):
        with pytest.raises(RefusedClass, match=r"\.metadata: refused [\w.]*" + name):
            read(tmp_path, hostile)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cposix\nsystem\n.",
        b"\x80\x04\x8c\x05posix\x8c\x06system\x93.",
        b"(iposix\nsystem\n.",
        b"(cposix\nsystem\no.",
        b"\x80\x02ctorch\nfloat32\nU\x05os\x00\x00R.",
        b"\x80\x02cposix\nsystem\n" + pickle.EXT1 + b"\x01.",
    ],
)
def test_no_opcode_reaches_another_function(data: bytes) -> None:
    with pytest.raises(ForeignCheckpointError):
        read_metadata_pickle(data)


def test_an_extension_code_of_this_process_is_refused() -> None:
    copyreg.add_extension("posix", "system", 77)
    try:
        with pytest.raises(ForeignCheckpointError, match="opcode 0x82"):
            read_metadata_pickle(b"\x80\x02" + pickle.EXT1 + bytes([77]) + b".")
    finally:
        copyreg.remove_extension("posix", "system", 77)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02N" + pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1) + b".",
        pickle.BYTEARRAY8 + struct.pack("<Q", 2**40) + b".",
        pickle.BINUNICODE + struct.pack("<I", 2**32 - 1) + b".",
        pickle.BINBYTES + struct.pack("<I", 2**32 - 1) + b".",
    ],
)
def test_a_file_of_ten_bytes_takes_no_memory(data: bytes) -> None:
    tracemalloc.start()
    try:
        with contextlib.suppress(ForeignCheckpointError):
            read_metadata_pickle(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def _shared(levels: int) -> bytes:
    """A list of two references to a list of two references ...: its text has 2^levels characters."""
    return b"]" + b"".join(b"\x94](h%ch%ce" % (number, number) for number in range(levels))


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02" + _shared(60) + b"\x8c\x01x\x93.",
        b"\x80\x02cpathlib\nPosixPath\n" + _shared(60) + b"\x85R.",
    ],
)
def test_a_value_with_shared_parts_is_refused_without_a_visit_of_each(data: bytes) -> None:
    with pytest.raises(ForeignCheckpointError):  # it names 2**60 parts: one that visited them would never end
        read_metadata_pickle(data)


def test_a_list_of_100_000_levels_is_read_without_recursion() -> None:
    value = read_metadata_pickle(b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".")
    levels = 1
    while value:
        (value,) = value
        levels += 1
    assert levels == 100_000


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\x80\x04.",
        b"a.",
        b"\x80\x02h\x05.",
        b"\x80\x02\x8c\xffab.",
        b"\x80\x02K\x01}.b.",
        b"\x80\x02}" + b")" + b"\x85" * 100_000 + b"Ns.",  # Python crashes when it hashes a tuple of this depth
        pickle.dumps(metadata())[:-40],
        pickle.dumps({"no": "metadata"}),
        pickle.dumps([1, 2]),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ForeignCheckpointError, match=r"\.metadata: "):
        read(tmp_path, data)


def test_a_directory_without_metadata_is_named(tmp_path: Path) -> None:
    with pytest.raises(ForeignCheckpointError, match="its save did not finish"):
        read_dcp_metadata(tmp_path)


def _with_file(name: str) -> Metadata:
    value = metadata()
    value.storage_data[MetadataIndex("b.0")].relative_path = name
    return value


def _with_chunk(*chunks: tuple[list[int], list[int]]) -> Metadata:
    value = metadata()
    value.state_dict_metadata["a.w"].chunks = [
        ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in chunks
    ]
    return value


def _changed(**changed: Any) -> Metadata:
    return metadata(**changed)


def _with_length(length: int) -> Metadata:
    value = metadata()
    value.storage_data[MetadataIndex("a.w", [0, 0])].length = length
    return value


def _with_extension() -> Metadata:
    value = metadata()
    value.storage_data[MetadataIndex("b.0")].transform_descriptors = ["zstd"]
    return value


def _lists_bomb() -> Metadata:
    value = metadata()
    value.planner_data["b.0"] = ("b", 10**12)
    return value


def _many_shards() -> Metadata:
    """A thousand tensors that refer to one list of a thousand shards."""
    whole = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 3]))
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.int8), torch.Size([4, 3]), [whole] * 1000)
    names = [f"t{number}" for number in range(1000)]
    return metadata(
        state_dict_metadata=dict.fromkeys(names, tensor),
        storage_data={MetadataIndex(name, [0, 0]): _StorageInfo("__0_0.distcp", 0, 100) for name in names},
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (_with_file("../../etc/passwd"), "outside of the directory"),
        (_with_file("/etc/passwd"), "outside of the directory"),
        (_with_file("a\0b"), "no file name"),
        (_with_chunk(([0, 0], [2, 3])), r"'a\.w' is incomplete: its shards have 6 of 12 elements"),
        (_with_chunk(([0, 0], [3, 3]), ([2, 0], [2, 3])), "overlap"),
        (_with_chunk(([0, 0], [2, 3]), ([2, 0], [9, 3])), "outside of its shape|expected at least"),
        (_with_chunk(([0], [2])), "has a shard"),
        (_with_chunk(([0, 0], [2, 2**50])), "invalid size"),
        (_changed(storage_data={}), "is in no file"),
        (_with_length(3), "has 3 bytes in __0_0.distcp, expected at least 12"),
        (_with_extension(), "extensions"),
        (_lists_bomb(), "invalid path"),
        (_many_shards(), "more shards than it can describe"),
        (_changed(planner_data={"a.w": ("x",), "b.0": ("x",)}), "the same path"),
        (_changed(planner_data={"a.w": ((1, 2),), "b.0": ("x",)}), "invalid path"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(tmp_path: Path, value: Metadata, words: str) -> None:
    with pytest.raises(ForeignCheckpointError, match=words):
        read(tmp_path, value)


@pytest.mark.parametrize(
    "data",
    [
        b"X" + (5000).to_bytes(4, "little") + b"a" * 5000 + b"q\0cpathlib\nPosixPath\n(" + b"h\0" * 1000 + b"tR.",
        b"](" + b"K\x01" * 5000 + b"eq\0ctorch\nSize\nq\1](" + b"h\1h\0\x85R" * 1000 + b"e.",
        b"}("
        + b"".join(b"K%cN" % key for key in range(256))
        + b"uq\0ccollections\nOrderedDict\nq\1]("
        + b"h\1h\0\x85R" * 1000
        + b"e.",
    ],
)
def test_a_value_that_is_named_many_times_is_not_copied_each_time(data) -> None:
    with pytest.raises(ForeignCheckpointError, match="the metadata copies more values than it has"):
        read_metadata_pickle(b"\x80\x02" + data)
