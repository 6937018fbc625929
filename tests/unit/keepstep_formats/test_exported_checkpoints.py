"""Checkpoints of keepstep become files of other programs, and come back bit-equal. Those programs are witnesses."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp
from torch.utils._python_dispatch import TorchDispatchMode

from keepstep.checkpoint import CheckpointDamaged, CheckpointError, StoredCheckpoint, save
from keepstep.checkpoint.interchange import (
    CannotHold,
    ForeignCheckpointError,
    Format,
    export_checkpoint,
    import_checkpoint,
)
from tests.unit.keepstep_formats.checkpoint_files import files, flip, stored
from tests.unit.keepstep_formats.states import equal, every_dtype, training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# ---- torch.distributed.checkpoint


def test_plain_dcp_load_reads_an_exported_directory(tmp_path: Path) -> None:
    state = training_state()
    save(state, tmp_path / "ours")
    done = export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert done.format is Format.DCP
    into = {
        "model": {name: torch.zeros_like(value) for name, value in state["model"].items()},
        "tensors": {name: torch.zeros_like(value) for name, value in state["tensors"].items()},
        "list": [{"x": torch.zeros(3, dtype=torch.int64)}, torch.tensor(0.0)],
        "optimizer": state["optimizer"] | {"param_groups": [dict.fromkeys(state["optimizer"]["param_groups"][0])]},
        **dict.fromkeys(("plain", "array", "scalar", "when")),
    }
    moments = {number: {name: torch.zeros_like(one) for name, one in each.items()} for number, each in _moments(state)}
    into["optimizer"]["state"] = moments
    dcp.load(into, checkpoint_id=tmp_path / "theirs")
    assert equal(into, state)
    assert str(tmp_path / "theirs") == FileSystemReader(tmp_path / "theirs").read_metadata().storage_meta.checkpoint_id


def _moments(state: dict[str, Any]) -> Any:
    return state["optimizer"]["state"].items()


def test_a_directory_is_the_same_after_an_export_and_an_import(tmp_path: Path) -> None:
    state = training_state()
    save(state, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "again")
    assert equal(stored(tmp_path / "again"), state)


def test_the_conversions_of_the_recipe_take_what_an_export_wrote(tmp_path: Path) -> None:
    save({"app": {"model": {"w": torch.arange(6.0).reshape(2, 3)}, "step": 4}}, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "checkpoint")
    dcp_to_torch_save(tmp_path / "checkpoint", tmp_path / "torch_save_checkpoint.pth")
    torch_save_to_dcp(tmp_path / "torch_save_checkpoint.pth", tmp_path / "checkpoint_new")
    import_checkpoint(tmp_path / "checkpoint_new", tmp_path / "again")
    assert equal(stored(tmp_path / "again"), stored(tmp_path / "ours"))


def test_an_empty_dict_is_reported_because_dcp_has_no_place_for_it(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "optimizer": {"state": {}}}, tmp_path / "ours")
    assert export_checkpoint(tmp_path / "ours", tmp_path / "theirs").left_out == ("optimizer.state",)


def test_two_values_with_one_key_of_dcp_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the key '1'"):
        save({1: torch.ones(2), "1": torch.ones(2)}, tmp_path / "ours")


# ---- torch.save


def test_a_file_of_torch_save_is_exported_and_imported(tmp_path: Path) -> None:
    state = training_state()
    save(state, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "state.pt")
    assert equal(torch.load(tmp_path / "state.pt", weights_only=False), state)  # a file that this test has made
    import_checkpoint(tmp_path / "state.pt", tmp_path / "again")
    again = stored(tmp_path / "again")
    assert equal(again, state)
    assert list(again["optimizer"]["state"]) == [0, 1, 2, 3]


# ---- safetensors


@pytest.mark.parametrize("shard_bytes", [None, 1, 100, 1 << 30])
def test_safetensors_are_exported_and_imported(tmp_path: Path, shard_bytes: int | None) -> None:
    tensors = every_dtype()
    save({"model": tensors, "step": 3}, tmp_path / "ours")
    path = tmp_path / ("m.safetensors" if shard_bytes is None else "m")
    done = export_checkpoint(tmp_path / "ours", path, part="model", shard_bytes=shard_bytes)
    assert (done.format, done.tensors, done.left_out) == (Format.SAFETENSORS, len(tensors), ())
    import_checkpoint(path, tmp_path / "again", part="model")
    assert equal(stored(tmp_path / "again"), {"model": tensors})
    for file in [path] if shard_bytes is None else path.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        assert header.pop("__metadata__") == {"format": "pt"}
        for key, row in header.items():
            begin, end = row["data_offsets"]
            raw = data[8 + int.from_bytes(data[:8], "little") :][begin:end]
            assert raw == tensors[key].reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def test_the_library_of_safetensors_reads_and_writes_the_same(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensors = {key: one.contiguous() for key, one in every_dtype().items()}
    save(tensors, tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", tmp_path / "m.safetensors")
    assert equal(library.load_file(tmp_path / "m.safetensors"), tensors)
    library.save_file(tensors, tmp_path / "theirs.safetensors")
    import_checkpoint(tmp_path / "theirs.safetensors", tmp_path / "again")
    assert equal(stored(tmp_path / "again"), tensors)


def test_values_that_safetensors_cannot_hold_are_named_or_left_out(tmp_path: Path) -> None:
    save({"w": torch.ones(2), "step": 3, "c": torch.ones(1, dtype=torch.complex128)}, tmp_path / "ours")
    target = tmp_path / "m.safetensors"
    with pytest.raises(CannotHold, match=r"holds only tensors, and step is not: .*--skip-objects"):
        export_checkpoint(tmp_path / "ours", target)
    with pytest.raises(CannotHold, match=r"c has dtype torch\.complex128"):
        export_checkpoint(tmp_path / "ours", target, skip_objects=True)
    assert files(tmp_path) == {"ours"}


# ---- complete or absent


@pytest.mark.parametrize("name", ["state.pt", "out.safetensors", "sharded", "dcp"])
def test_an_export_holds_one_tensor_at_a_time(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"w{number}": torch.full((300,), float(number)) for number in range(20)}
    save(state, tmp_path / "ours")
    usual, alive, most = StoredCheckpoint.tensor, 0, 0

    def end() -> None:
        nonlocal alive
        alive -= 1

    def tensor(self: StoredCheckpoint, key: str) -> torch.Tensor:
        nonlocal alive, most
        array = usual(self, key).numpy()
        weakref.finalize(array, end)  # it lives as long as the memory of the tensor
        alive += 1
        most = max(most, alive)
        return torch.from_numpy(array)

    with monkeypatch.context() as patch:
        patch.setattr(StoredCheckpoint, "tensor", tensor)
        export_checkpoint(tmp_path / "ours", tmp_path / name, shard_bytes=3000 if name == "sharded" else None)
    assert (alive, most in (1, 2)) == (0, True)
    if name == "state.pt":
        assert equal(torch.load(tmp_path / name, weights_only=True, mmap=True), state)
    import_checkpoint(tmp_path / name, tmp_path / "again")
    assert equal(stored(tmp_path / "again"), state)


@pytest.mark.parametrize("name", ["state.pt", "out.safetensors", "dcp"])
def test_an_export_copies_no_tensor(tmp_path: Path, name: str) -> None:
    """Torch copies on several threads, which wait for each other: 20 ms for each tensor while the cores are busy."""
    save({f"w{number}": torch.full((300, 100), float(number)) for number in range(9)}, tmp_path / "ours")
    copied: list[Any] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                copied.append(args[0].shape)
            return func(*args, **(kwargs or {}))

    with Copies():
        export_checkpoint(tmp_path / "ours", tmp_path / name)
    assert copied == []


def test_a_destination_that_exists_is_kept(tmp_path: Path) -> None:
    save({"w": torch.ones(2)}, tmp_path / "ours")
    (tmp_path / "a.pt").write_text("mine")
    with pytest.raises(ForeignCheckpointError, match=r"a\.pt exists"):
        export_checkpoint(tmp_path / "ours", tmp_path / "a.pt")
    assert (tmp_path / "a.pt").read_text() == "mine"
    with pytest.raises(ForeignCheckpointError, match=r"folder .*nowhere not found"):
        export_checkpoint(tmp_path / "ours", tmp_path / "nowhere" / "a.pt")


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors", "directory"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    save({"w": torch.ones(200_000)}, tmp_path / "ours")
    monkeypatch.setattr("os.fsync", _full)
    with pytest.raises(OSError, match="full"):
        export_checkpoint(tmp_path / "ours", tmp_path / name)
    assert files(tmp_path) == {"ours"}


def _full(_: int) -> None:
    raise OSError(28, "disk full")


def test_a_damaged_chunk_is_not_exported(tmp_path: Path) -> None:
    save({"w": torch.ones(1000)}, tmp_path / "ours")
    flip(next((tmp_path / "ours").glob("pack*")), 100)
    with pytest.raises(CheckpointDamaged, match="pack"):
        export_checkpoint(tmp_path / "ours", tmp_path / "a.pt")
    assert files(tmp_path) == {"ours"}


def test_a_part_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2)}}, tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"no value below 'modle'; it has model\.w"):
        export_checkpoint(tmp_path / "ours", tmp_path / "a.pt", part="modle")
    with pytest.raises(CheckpointError, match="no shards"):
        export_checkpoint(tmp_path / "ours", tmp_path / "a.pt", shard_bytes=5)
