"""A stored checkpoint as the files of torch.distributed.checkpoint, which a relay writes without torch."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict, deque
from datetime import UTC, date, datetime, time, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from keepstep.state.pack import Pack
from keepstep.state.pack_layout import describe
from keepstep.state.values.leaves import TORCH_DTYPES, WITHOUT_COPY
from keepstep.state.values.sharding import LocalShard
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.state_content import ITEM_BYTES, Content, Sharding, unpack_content
from keepstep_relay.torch_view.torch_files import METADATA, TorchDirectory, torch_directory
from tests.support.models.wrapped_tensor import scaled

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:ComplexHalf support")

OBJECTS = {
    "integers": [0, -5, 1 << 40, -(1 << 70), True],
    "numbers": (1.5, 1 + 2j, float("inf")),
    "text": "hé",
    "bytes": b"abc",
    "long": b"y" * 100_000,
    "none": None,
    "nested": (1, (2, "x"), {"k": [b"z"]}),
    "sets": ({1, 2}, frozenset({"a"})),
    "array": np.arange(6.0).reshape(2, 3),
    "days": np.array(["2020-01-01"], dtype="M8[D]"),
    "strings": np.array(["añ"]),
    "empty_array": np.empty(0),
    "scalar": np.float32(3),
    "torch": (torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1")),
    "when": (datetime(2020, 1, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2020, 1, 2, fold=1)),  # noqa: DTZ001
    "times": (time(1, 2, fold=1), date(2021, 2, 3), timedelta(days=-1, microseconds=3)),
}


def stored(*states: Any) -> tuple[TorchDirectory, list[bytes]]:
    """Return the directory of a checkpoint with a state a rank, and the packs."""
    packs = [Pack(describe(state)) for state in states]
    data = [b"".join(bytes(one.chunk(number)) for number in range(one.chunks)) for one in packs]
    return torch_directory([b"root"] * len(packs), [unpack_content(one.content_bytes) for one in packs]), data


def written(directory: TorchDirectory, packs: list[bytes], path: Any) -> str:
    path.mkdir()
    for name, file in directory.files.items():
        parts = [
            one if isinstance(one, bytes) else packs[one.rank][one.offset : one.offset + one.length]
            for one in file.segments
        ]
        (path / name).write_bytes(b"".join(parts))
        assert (path / name).stat().st_size == file.size
    return str(path)


def everything(path: str) -> dict[str, Any]:
    """Load all that a directory has, as ``dcp_to_torch_save`` does."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found, storage_reader=dcp.FileSystemReader(path), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_of_every_dtype_come_back(tmp_path):
    tensors = {
        name: (torch.arange(48) % 2).to(torch.uint8).view(dtype)
        for name, dtype in TORCH_DTYPES.items()
        if dtype not in WITHOUT_COPY
    }
    tensors |= {"strided": torch.arange(12.0).reshape(3, 4).t(), "empty": torch.empty(0, 3), "0-d": torch.tensor(2.5)}
    tensors["tied"] = tensors["strided"][1:]
    found = everything(written(*stored({"t": tensors}), tmp_path / "d"))["t"]
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def test_sizes_of_elements_are_those_of_torch():
    assert {name: dtype.itemsize for name, dtype in TORCH_DTYPES.items()}.items() <= ITEM_BYTES.items()


def test_other_values_come_back(tmp_path):
    ordered = OrderedDict(a=1)
    ordered._metadata = {"version": 2}
    state = {**OBJECTS, "tuple": (torch.ones(2), {"w": torch.zeros(3)}, ordered)}
    path = written(*stored({"objects": state, "groups": [{"lr": 0.1, 0: torch.ones(2)}]}), tmp_path / "d")
    found = everything(path)
    for name, value in OBJECTS.items():
        got = found["objects"][name]
        if isinstance(value, np.ndarray):
            assert (got.dtype, got.tolist(), got.flags.writeable) == (value.dtype, value.tolist(), True), name
        else:
            assert (type(got), repr(got)) == (type(value), repr(value)), name
    assert found["objects"]["when"][1].fold == found["objects"]["times"][0].fold == 1
    one, two, three = found["objects"]["tuple"]
    assert one.equal(torch.ones(2))
    assert two["w"].equal(torch.zeros(3))
    assert (type(three), three, three._metadata) == (OrderedDict, ordered, {"version": 2})
    assert found["groups"][0]["lr"] == 0.1
    assert found["groups"][0]["0"].equal(torch.ones(2))


class Mode(Enum):
    WARM = "warm"


class Point(NamedTuple):
    x: int


def test_values_of_other_classes_are_shown_as_plain_ones(tmp_path):
    """torch unpickles them: the relay names no class that a checkpoint chose."""
    state = {
        "tuple": (Counter({3: 1}), defaultdict(list, a=[1]), Mode.WARM, Point(1), Path("/x"), torch.per_tensor_affine),
        "queue": deque([1, torch.ones(2)], maxlen=3),
        "bytes": bytearray(b"ab"),
        "files": {"short": io.BytesIO(b"abc"), "long": io.BytesIO(bytes(10_000))},
        "milestones": Counter({30: 1}),
    }
    found = everything(written(*stored(state), tmp_path / "d"))
    assert found["tuple"] == ({3: 1}, {"a": [1]}, "warm", (1,), "/x", "per_tensor_affine")
    assert type(found["tuple"][0]) is dict
    assert (type(found["queue"]), found["queue"].maxlen, found["queue"][0]) == (deque, 3, 1)
    assert found["queue"][1].equal(torch.ones(2))
    assert found["bytes"] == bytearray(b"ab")
    assert (found["files"]["short"].read(), found["files"]["long"].read()) == (b"abc", bytes(10_000))
    assert found["milestones"] == {"30": 1}


def test_a_tensor_that_wraps_others_is_named():
    with pytest.raises(ManifestError, match=r"state\.exp_avg cannot be shown to torch: .*keepstep.checkpoint.load"):
        stored({"state": {"exp_avg": scaled(1)}})


def shard(rows: range) -> LocalShard:
    whole = torch.arange(12.0).reshape(4, 3)
    return LocalShard(whole[rows.start : rows.stop], Sharding((4, 3), (rows.start, 0), (), (), ()))


def test_shards_of_several_ranks_are_loaded_into_one_tensor_and_equal_values_are_stored_once(tmp_path):
    directory, packs = stored({"w": shard(range(1)), "b": torch.ones(2)}, {"w": shard(range(1, 4)), "b": torch.ones(2)})
    assert directory.files.keys() == {METADATA, "__0_0.distcp", "__1_0.distcp"}
    state = {"w": torch.zeros(4, 3), "b": torch.zeros(2)}
    dcp.load(state, checkpoint_id=written(directory, packs, tmp_path / "d"))
    assert state["w"].equal(torch.arange(12.0).reshape(4, 3))
    assert state["b"].equal(torch.ones(2))


def test_an_empty_dict_does_not_make_torch_take_the_keys_for_older_ones(tmp_path):
    path = written(*stored({"optimizer": {"state": {}, "lr": 0.5}}), tmp_path / "d")
    state = {"optimizer": {"state": {}, "lr": 0.0}}
    dcp.load(state, checkpoint_id=path)
    assert state == {"optimizer": {"state": {}, "lr": 0.5}}


def test_any_range_of_a_file_is_that_range():
    directory, packs = stored({"w": torch.arange(100.0), "v": torch.ones(3)})
    file = directory.files["__0_0.distcp"]

    def read(first: int, end: int) -> bytes:
        return b"".join(
            one if isinstance(one, bytes) else packs[0][one.offset : one.offset + one.length]
            for one in file.cut(first, end)
        )

    whole = read(0, file.size)
    assert len(whole) == file.size
    for first in range(0, file.size, 7):
        assert read(first, min(first + 50, file.size)) == whole[first : first + 50]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        (({"w": shard(range(3))},), "w is incomplete in this checkpoint: its shards have 9 of 12 elements"),
        (
            ({"w": shard(range(3))}, {"w": shard(range(2, 4))}),
            "w is incomplete in this checkpoint: the shards .* overlap",
        ),
        (({"w": torch.ones(2)}, {"w": 1}), "w is a tensor at one rank and another value at rank 1"),
        (({"w": shard(range(4))}, {"w": torch.ones(2)}), "w is a float32 tensor of shape .* at rank 1"),
    ],
)
def test_ranks_that_contradict_each_other_are_refused(states, message):
    with pytest.raises(ManifestError, match=message):
        stored(*states)


@pytest.mark.parametrize(
    "node",
    [
        ["posix.system", "x"],
        ["numpy:|O8", 1],
        ["scalar", "|O8", b"x"],
        ["dtype", "float32\nposix\nsystem"],
        ["dict", 1],
        ["int", 5],
        ["int", b"x" * 70_000],
        ["datetime", "tomorrow", 0],
        ["timedelta", "x"],
        ["complex", 1],
        [[]],
    ],
)
def test_invalid_values_are_refused(node):
    with pytest.raises(ManifestError):
        torch_directory([b""], [Content(["dict", "a", node], (), ())])


@pytest.mark.parametrize("key", [["int"], ["int", 5], ["int", b"x" * 5000], ["tuple", ["int"]]])
def test_invalid_keys_are_refused(key):
    with pytest.raises(ManifestError, match="invalid integer as a key"):
        torch_directory([b""], [Content(["dict", key, 1], (), ())])


def test_invalid_paths_are_refused():
    tree = ["dict", "format", "keepstep-checkpoint-1", "tensors", ["dict"], "objects", ["dict", "x", 1]]
    with pytest.raises(ManifestError, match="path of x is invalid"):
        torch_directory([b""], [Content([*tree, "paths", ["dict", "x", ["tuple", ["tuple"]]]], (), ())])
