"""Files of other programs become checkpoints of keepstep. A damaged or hostile file is refused, and runs no code."""

from __future__ import annotations

import asyncio
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import SerializationFormat

from keepstep.checkpoint import CheckpointNotFound, load
from keepstep.checkpoint.interchange import ForeignCheckpointError, Format, RefusedClass, import_checkpoint
from keepstep.checkpointing import UnsupportedValue
from keepstep.state.pack import KEPT_TENSORS
from keepstep_formats.dcp_directory import DcpDirectory
from keepstep_formats.pickled_items import load_pickled
from keepstep_formats.safetensors_files import INDEX
from tests.support.services.relay_driver import relay
from tests.unit.keepstep_formats.checkpoint_files import files, flip, stored
from tests.unit.keepstep_formats.states import equal, every_dtype, read_directory, training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Custom:
    """A value that only pickle can hold."""

    ran = False

    def __setstate__(self, state: Any) -> None:
        Custom.ran = True

    def __getstate__(self) -> Any:
        return {"x": 1}


# ---- torch.distributed.checkpoint


def test_a_directory_of_plain_dcp_save_is_imported(tmp_path: Path) -> None:
    state = training_state()
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", step=7)
    assert (done.format, done.left_out) == (Format.DCP, ())
    assert equal(stored(tmp_path / "ours"), state)
    into = {"model": {name: torch.zeros_like(value) for name, value in state["model"].items()}}
    load(into, tmp_path / "ours")
    assert equal(into["model"], dict(state["model"]))


def test_shards_of_several_files_are_joined(tmp_path: Path) -> None:
    """Two ranks of DCP, each with half of a tensor, as its writer stores them."""
    whole = torch.randn(4, 3)
    _save_shards(tmp_path, whole)
    assert len([name for name in files(tmp_path) if name.endswith(".distcp")]) == 2
    assert equal(read_directory(tmp_path), {"w": whole})


def _save_shards(path: Path, whole: torch.Tensor) -> None:
    """Write the halves of ``whole`` as two ranks do."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    halves = {0: whole[:2], 2: whole[2:]}

    class Planner(DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            return halves[index.offset[0]].clone()

    writer, planner = FileSystemWriter(path, thread_count=1), Planner()
    writer.set_up_storage_writer(True)
    properties = TensorProperties(dtype=whole.dtype)
    items = [
        WriteItem(
            MetadataIndex("w", [row, 0]),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size([row, 0]), half.shape), properties, whole.shape
            ),
        )
        for row, half in halves.items()
    ]
    plans, metadata = planner.create_global_plan([SavePlan([one], planner_data={"w": ("w",)}) for one in items])
    results = [writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)]
    writer.finish(metadata, results)


async def test_an_import_of_a_directory_holds_the_tensors_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{number}": torch.full((300_000,), float(number)) for number in range(20)}
    dcp.save(state, checkpoint_id=tmp_path / "theirs")
    usual, alive, most, reads = DcpDirectory._read, 0, 0, 0
    counting = threading.RLock()  # a finalizer runs anywhere

    def end() -> None:
        nonlocal alive
        with counting:
            alive -= 1

    def read(self: DcpDirectory, key: str) -> torch.Tensor:
        nonlocal alive, most, reads
        array = usual(self, key).numpy()
        weakref.finalize(array, end)
        with counting:
            alive, reads = alive + 1, reads + 1
            most = max(most, alive)
        return torch.from_numpy(array)

    monkeypatch.setattr(DcpDirectory, "_read", read)
    monkeypatch.setattr("keepstep.state.pack.KEPT_BYTES", 0)
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert (alive, reads) == (0, 20)
    assert most <= 8 + KEPT_TENSORS, "a chunk has bytes of eight of them"
    assert equal(stored(tmp_path / "ours"), state)
    async with relay(data_dir=tmp_path / "relay") as one:
        place = f"{one.address}/v1/jobs/j/checkpoints/c"
        await asyncio.to_thread(import_checkpoint, tmp_path / "theirs", place)
        assert equal(await asyncio.to_thread(stored, place), state)
    assert alive == 0


@pytest.mark.parametrize("how", [{}, {"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}])
@pytest.mark.parametrize("form", SerializationFormat)
def test_every_variant_of_dcp_is_read(tmp_path: Path, form: SerializationFormat, how: dict[str, Any]) -> None:
    """torch 2.13 cannot read its own safetensors variant, nor the other values that it writes before the tensors."""
    pytest.importorskip("safetensors")
    model = {key: tensor.contiguous() for key, tensor in every_dtype().items()}
    state = {"model": model, "step": 7, "list": [1, "text", {"x": torch.arange(3)}]}
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, serialization_format=form, **how))
    assert equal(read_directory(tmp_path), state)


@pytest.mark.parametrize("length", [0x280, 0x4B50])
def test_safetensors_whose_length_looks_like_a_file_of_torch_save_are_read(tmp_path: Path, length: int) -> None:
    """The length of the header comes first: 640 has the bytes of a pickle, and 19280 those of a zip file."""
    pytest.importorskip("safetensors")
    state = {"w" * (10 + (length - 184) // 2): torch.arange(4.0)}  # the header has the name twice
    dcp.save(state, storage_writer=FileSystemWriter(tmp_path, serialization_format=SerializationFormat.SAFETENSORS))
    assert (tmp_path / "__0_0.distcp").read_bytes()[:8] == length.to_bytes(8, "little")
    assert equal(read_directory(tmp_path), state)


def test_a_flipped_byte_of_a_shard_is_named(tmp_path: Path) -> None:
    dcp.save({"a": torch.zeros(100), "w": torch.ones(1000)}, checkpoint_id=tmp_path)
    file = tmp_path / "__0_0.distcp"
    flip(file, file.read_bytes().rindex(torch.ones(8).numpy().tobytes()))
    with pytest.raises(ForeignCheckpointError, match=r"'w' in .*__0_0.distcp is damaged: .* check sum"):
        read_directory(tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), "__0_0.distcp not found: the directory is incomplete"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "of a file of|is damaged"),
        (lambda file: file.write_bytes(b""), "of a file of 0 bytes"),
    ],
)
def test_a_missing_or_short_file_is_named(tmp_path: Path, damage: Any, words: str) -> None:
    dcp.save({"w": torch.ones(1000)}, checkpoint_id=tmp_path)
    damage(tmp_path / "__0_0.distcp")
    with pytest.raises(ForeignCheckpointError, match=words):
        read_directory(tmp_path)


def test_a_value_of_another_class_is_refused_by_name_or_left_out(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "x": Custom()}, checkpoint_id=tmp_path / "theirs")
    with pytest.raises(RefusedClass, match=r"'x' in .*__0_0.distcp has objects of .*Custom.*--skip-objects"):
        import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert files(tmp_path) == {"theirs"}
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "ours", skip_objects=True)
    assert done.left_out == ("x",)
    assert equal(stored(tmp_path / "ours"), {"w": torch.ones(2)})
    assert not Custom.ran


# ---- torch.save


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_file_of_torch_save_runs_only_on_request(tmp_path: Path, zipped: bool) -> None:
    torch.save({"w": torch.ones(2), "x": Custom()}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(ForeignCheckpointError, match=r"Custom"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours")
    assert not Custom.ran
    try:
        with pytest.raises(UnsupportedValue, match=r"\['x'\] is a .*Custom"):
            import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", allow_pickle=True)
        assert Custom.ran
        assert files(tmp_path) == {"a.pt"}
        done = import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", allow_pickle=True, skip_objects=True)
        assert done.left_out == ("x",)
    finally:
        Custom.ran = False


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.array(["a", "bcd"]),
        np.array(["2026-01-02", "2026-01-03"], dtype="datetime64[ms]"),
        np.array([5, 10], dtype="timedelta64[25s]"),
        np.empty((0, 3), np.float16),
        np.array(3 + 2j),
    ],
)
def test_numpy_arrays_of_files_are_imported(tmp_path: Path, array: Any) -> None:
    torch.save({"list": [(array, array[...])]}, tmp_path / "a.pt")
    import_checkpoint(tmp_path / "a.pt", tmp_path / "ours")
    assert equal(stored(tmp_path / "ours"), {"list": [(array, array)]})


class _Calls:
    def __init__(self, *call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "value",
    [
        _Calls(np.ndarray, ((1,), "O", b"\x01" * 8)),  # numpy makes pointers of these bytes
        _Calls(np.dtype, ("V8",), (4, "|", None, None, None, 1 << 20, 1, 0)),
        np.array([[], None], dtype=object),
        np.zeros(1, dtype=[("x", "<f4")]),
    ],
)
def test_arrays_of_objects_are_refused(tmp_path: Path, value: Any) -> None:
    torch.save({"x": [value]}, tmp_path / "a.pt")
    with pytest.raises((ForeignCheckpointError, UnsupportedValue)):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours")
    assert files(tmp_path) == {"a.pt"}


def test_a_flipped_byte_of_a_file_of_torch_save_is_found(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "a.pt")
    flip(tmp_path / "a.pt", (tmp_path / "a.pt").read_bytes().index(torch.ones(8).numpy().tobytes()))
    with pytest.raises(ForeignCheckpointError, match=r"a\.pt is damaged: part a/data/0"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours")
    assert files(tmp_path) == {"a.pt"}


def _itself() -> dict[str, Any]:
    state: dict[str, Any] = {"w": torch.ones(1)}
    state["again"] = state
    return state


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.ones(2), "has a Tensor, expected a dict"), (_itself(), "contains itself"), (None, "expected a dict")],
)
def test_a_file_without_a_state_dict_is_refused(tmp_path: Path, value: Any, words: str) -> None:
    torch.save(value, tmp_path / "a.pt")
    with pytest.raises(ForeignCheckpointError, match=words):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("hello")
    with pytest.raises(ForeignCheckpointError, match=r"a\.pt cannot be read"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours")
    with pytest.raises(ForeignCheckpointError, match="not found"):
        import_checkpoint(tmp_path / "b.pt", tmp_path / "ours")


@pytest.mark.parametrize("twice", [lambda one: [one, one], lambda one: (one, one), lambda one: {"a": one, "b": one}])
def test_a_small_file_with_a_huge_number_of_values_is_refused(tmp_path, twice):
    value = [1]
    for _ in range(20):  # a file of 2 KB; with 40 it would be 2**40 values
        value = twice(value)
    torch.save({"state": value}, tmp_path / "a.pt")
    with pytest.raises(
        ForeignCheckpointError, match="values: a list or dict contains itself, or is contained several times"
    ):
        load_pickled(tmp_path / "a.pt", "a.pt")


# ---- a load of files that are not imported


def test_a_load_of_files_of_another_program_names_the_import(tmp_path: Path) -> None:
    state = {"w": torch.ones(2)}
    torch.save(state, tmp_path / "a.pt")
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    for name in ("a.pt", "dcp", "hf"):
        with pytest.raises(CheckpointNotFound, match="; keepstep checkpoint import reads the files of other programs"):
            load({"w": torch.zeros(2)}, tmp_path / name)


# ---- safetensors


def _header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


def _row(dtype: str = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> str:
    return json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": offsets}})


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "file too short: 0 bytes, expected at least 8"),
        ((1 << 60).to_bytes(8, "little") + b"{}", "header too large"),
        (_header("[]"), "not a JSON object"),
        (_header("{" * 100_000), "no valid safetensors"),
        (_header("not json"), "no valid safetensors"),
        (_header('{"__metadata__": 3}'), "__metadata__"),
        (_header('{"w": 3}'), "dtype"),
        (_header(_row("F99"), bytes(4)), "dtype F99, which torch does not have; supported: BOOL"),
        (_header(_row("F6_E2M3", [4], [0, 3]), bytes(3)), "dtype F6_E2M3, which torch does not have"),
        (_header(_row("F4", [3], [0, 2]), bytes(2)), r"dtype F4 has shape \[3\]: torch needs an even last size"),
        (_header(_row("F4", [], [0, 1]), bytes(1)), r"dtype F4 has shape \[\]: torch needs an even last size"),
        (_header(_row(shape=[1 << 62, 1 << 62, 0], offsets=[0, 0])), "invalid shape"),
        (_header(_row(shape=[-1])), "invalid shape"),
        (_header(_row(shape=[1 << 40], offsets=[0, 1 << 42])), "it is damaged"),
        (_header(_row(offsets=[4, 8]), bytes(8)), "begins at byte"),
        (_header(_row(offsets=[0, 3]), bytes(4)), "data_offsets"),
        (_header(_row(), bytes(3)), "it is damaged"),
        (_header(_row(), bytes(5)), "it is damaged"),
    ],
)
def test_a_hostile_or_damaged_safetensors_file_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    with pytest.raises(ForeignCheckpointError, match=words):
        import_checkpoint(tmp_path / "m.safetensors", tmp_path / "ours")
    assert files(tmp_path) == {"m.safetensors"}


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ({"weight_map": {"w": "../secret.safetensors"}}, "not a file beside it"),
        ({"weight_map": {"w": "absent.safetensors"}}, "absent.safetensors not found"),
        ({}, "not a valid index of safetensors files"),
        ([], "not a valid index of safetensors files"),
    ],
)
def test_an_index_names_only_files_beside_it(tmp_path: Path, index: Any, words: str) -> None:
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ForeignCheckpointError, match=words):
        import_checkpoint(tmp_path, tmp_path / "ours")
