"""A folder of safetensors is read whole, or refused: a part of a checkpoint is never taken for all of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from keepstep.checkpoint import save
from keepstep.checkpoint.interchange import ForeignCheckpointError, Format, export_checkpoint, import_checkpoint
from keepstep_formats.safetensors_files import INDEX
from tests.unit.keepstep_formats.checkpoint_files import files, stored
from tests.unit.keepstep_formats.states import equal

safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATE = {
    "rows": torch.arange(15.0).reshape(5, 3),
    "columns": torch.arange(8.0).reshape(2, 4).bfloat16(),
    "short": torch.tensor([7.0]),
    "scalar": torch.tensor(3.5),
}
RANKS: list[dict[str, tuple[tuple[int, ...], torch.Tensor]]] = [
    {
        "rows": ((0, 0), STATE["rows"][:2]),
        "columns": ((0, 0), STATE["columns"][:, :2]),
        "short": ((0,), STATE["short"]),
    },
    {
        "rows": ((2, 0), STATE["rows"][2:4]),
        "columns": ((0, 2), STATE["columns"][:, 2:]),
        "scalar": ((), STATE["scalar"]),
    },
    {"rows": ((4, 0), STATE["rows"][4:]), "short": ((1,), STATE["short"][1:])},
]
"""Items that three ranks write, as with DTensors of three ranks: the third has an empty shard of ``short``."""


def write_parts(path: Path, *, order: Iterable[int] = range(3), **how: Any) -> Path:
    """Write the state as torch does on three ranks, in this order."""

    class Planner(DefaultSavePlanner):
        rank = 0

        def lookup_object(self, index: Any) -> Any:
            return RANKS[self.rank][index.fqn][1].clone()

    writer, planner = HuggingFaceStorageWriter(str(path), **how), Planner()
    writer.set_up_storage_writer(True)
    paths = {key: (key,) for key in STATE}
    plans = [SavePlan([_item(key, *part) for key, part in rank.items()], planner_data=paths) for rank in RANKS]
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    results: dict[int, Any] = {}
    placed = writer.prepare_global_plan(plans)
    for planner.rank in order:
        results[planner.rank] = writer.write_data(placed[planner.rank], planner).wait()
    writer.finish(metadata, [results[rank] for rank in sorted(results)])
    return path


def _item(key: str, offset: tuple[int, ...], part: torch.Tensor) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offset), part.shape)
    properties = TensorProperties(dtype=part.dtype)
    return WriteItem(
        MetadataIndex(key, torch.Size(offset)),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, STATE[key].shape),
    )


def imported(path: Path, tmp_path: Path) -> Mapping[str, Any]:
    done = import_checkpoint(path, tmp_path / "ours")
    assert (done.format, done.tensors, done.left_out) == (Format.SAFETENSORS, len(STATE), ())
    return stored(tmp_path / "ours")


# ---- parts of ranks


@pytest.mark.parametrize("mapping", [None, {"rows": 1, "columns": 2, "short": 2, "scalar": 1}])
def test_the_parts_of_all_ranks_are_joined(tmp_path: Path, mapping: Any) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True, fqn_to_index_mapping=mapping)
    assert all(name.startswith("shard-0000") for name in files(path))
    assert equal(imported(path, tmp_path), STATE)


def test_the_part_of_one_rank_is_refused(tmp_path: Path) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True)
    for name in files(path):
        with pytest.raises(ForeignCheckpointError, match=r"has the part of one rank: give its folder, .*theirs"):
            import_checkpoint(path / name, tmp_path / "ours")
    (path / "shard-00002-model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    with pytest.raises(ForeignCheckpointError, match=r"has only a part of rows, at \[2, 0\]"):
        import_checkpoint(tmp_path / "model.safetensors", tmp_path / "ours")
    assert files(tmp_path) == {"theirs", "model.safetensors"}


def test_a_missing_rank_is_named_with_the_way_to_consolidate(tmp_path: Path) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True)
    (path / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ForeignCheckpointError, match=r"none of shard-00002-\*\. .*enable_consolidation=True"):
        import_checkpoint(path, tmp_path / "ours")
    (path / "shard-00003-model-00001-of-00001.safetensors").rename(
        path / "shard-00002-model-00001-of-00001.safetensors"
    )
    with pytest.raises(ForeignCheckpointError, match=r"incomplete: rows: its shards have 9 of 15 elements"):
        import_checkpoint(path, tmp_path / "ours")


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"rows": ((1, 0), torch.zeros(1, 3))}, r"overlap"),
        ({"rows": ((0, 0), torch.zeros(2, 3))}, r"have the same part of rows, \[0:2, 0:3\]"),
        ({"rows": ((5, 0), torch.zeros(1, 3, dtype=torch.int8))}, r"another dtype or number of dimensions of rows"),
        ({"rows": ((5,), torch.zeros(3))}, r"another dtype or number of dimensions of rows"),
        ({"rows": ((1 << 60, 0), torch.zeros(1, 3))}, r"has position \[1152921504606846976, 0\]"),
        ({"rows": ((0,), torch.zeros(1, 3))}, r"has position \[0\]"),
    ],
)
def test_parts_that_contradict_each_other_are_refused(tmp_path: Path, part: Any, words: str) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True)
    offsets = {key: {"saved_offsets": list(offset)} for key, (offset, _) in part.items()}
    safetensors.save_file(
        {key: tensor for key, (_, tensor) in part.items()},
        path / "shard-00004-model-00001-of-00001.safetensors",
        {"DCP_SHARDING_INFO": json.dumps(offsets)},
    )
    with pytest.raises(ForeignCheckpointError, match=words):
        import_checkpoint(path, tmp_path / "ours")


def test_parts_without_positions_are_refused(tmp_path: Path) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True)
    safetensors.save_file({"w": torch.ones(1)}, path / "shard-00004-model-00001-of-00001.safetensors")
    with pytest.raises(ForeignCheckpointError, match="no DCP_SHARDING_INFO"):
        import_checkpoint(path, tmp_path / "ours")


# ---- consolidated folders


def test_a_consolidated_folder_is_read_with_its_scalars(tmp_path: Path) -> None:
    """Torch 2.13 and 2.14.1 write zeros for the values of 0-dim tensors when they consolidate. The parts have them."""
    path = write_parts(tmp_path / "theirs", save_distributed=True, enable_consolidation=True)
    assert files(path) == {"sharded", INDEX, "model-00001-of-00001.safetensors"}
    assert safetensors.load_file(path / "model-00001-of-00001.safetensors")["scalar"] == 0
    assert equal(imported(path, tmp_path), STATE)


def test_a_missing_last_rank_is_found_beside_the_consolidated_files(tmp_path: Path) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True, enable_consolidation=True)
    (path / "sharded" / "shard-00003-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ForeignCheckpointError, match=r"its parts make rows \(4, 3\), other than in .*index\.json"):
        import_checkpoint(path, tmp_path / "ours")


def test_a_missing_consolidated_file_is_named_with_the_parts_of_it(tmp_path: Path) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True, enable_consolidation=True)
    (path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ForeignCheckpointError, match=r"00001\.safetensors not found; give .*sharded"):
        import_checkpoint(path, tmp_path / "ours")


def test_a_consolidation_that_did_not_end_is_refused(tmp_path: Path) -> None:
    path = write_parts(tmp_path / "theirs", save_distributed=True, enable_consolidation=True)
    (path / INDEX).unlink()
    with pytest.raises(ForeignCheckpointError, match=r"its consolidation did not end; give .*sharded"):
        import_checkpoint(path, tmp_path / "ours")
    (path / "model-00001-of-00001.safetensors").unlink()
    with pytest.raises(ForeignCheckpointError, match=r"its consolidation did not end; give .*sharded"):
        import_checkpoint(path, tmp_path / "ours")
    assert equal(imported(path / "sharded", tmp_path), STATE)


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 2, 0)])
def test_a_file_that_one_rank_wrote_over_those_of_others_is_refused(tmp_path: Path, order: tuple[int, ...]) -> None:
    """Without ``save_distributed``, every rank writes the same file."""
    path = write_parts(tmp_path / "theirs", order=order)
    assert files(path) == {INDEX, "model-00001-of-00001.safetensors"}
    with pytest.raises(ForeignCheckpointError, match=r"save_distributed=True|by the index, .* is in model-00001"):
        import_checkpoint(path, tmp_path / "ours")
    index = json.loads((path / INDEX).read_text())
    held = safetensors.load_file(path / "model-00001-of-00001.safetensors")
    index["weight_map"] = {key: name for key, name in index["weight_map"].items() if key in held}
    (path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ForeignCheckpointError, match=r"each rank replaces the file of the others"):
        import_checkpoint(path, tmp_path / "ours")


@pytest.mark.parametrize("mapping", [None, {"rows": 1, "columns": 2, "short": 2, "scalar": 1}])
def test_what_one_process_writes_is_read(tmp_path: Path, mapping: Any) -> None:
    writer = HuggingFaceStorageWriter(str(tmp_path / "theirs"), fqn_to_index_mapping=mapping)
    dcp.save(dict(STATE), storage_writer=writer)
    assert INDEX in files(tmp_path / "theirs")
    assert equal(imported(tmp_path / "theirs", tmp_path), STATE)


# ---- folders of Hugging Face


def exported(tmp_path: Path) -> Path:
    """Write four files with an index, one for each tensor."""
    save(STATE, tmp_path / "saved")
    export_checkpoint(tmp_path / "saved", tmp_path / "hf", shard_bytes=1)
    assert len(files(tmp_path / "hf")) == 5
    return tmp_path / "hf"


def _drop(path: Path, name: str) -> None:
    (path / name).unlink()


def _cut(path: Path) -> None:
    file = path / "model-00002-of-00004.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def _map(path: Path, **changed: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= changed
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: _drop(path, "model-00003-of-00004.safetensors"), r"00003-of-00004\.safetensors not found"),
        (_cut, r"00002-of-00004\.safetensors is no valid safetensors file: .* it is damaged"),
        (lambda path: _map(path, short="model-00001-of-00004.safetensors"), r"by the index, short is in model-00001"),
        (lambda path: _map(path, other="model-00001-of-00004.safetensors"), r"by the index, other is in model-00001"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path: Path, damage: Any, words: str) -> None:
    path = exported(tmp_path)
    damage(path)
    with pytest.raises(ForeignCheckpointError, match=words):
        import_checkpoint(path, tmp_path / "ours")


def test_a_tensor_that_the_index_does_not_name_is_not_dropped(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    safetensors.save_file(STATE, tmp_path / "hf" / "a.safetensors")
    (tmp_path / "hf" / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(list(STATE)[:2], "a.safetensors")}))
    with pytest.raises(ForeignCheckpointError, match=r"by the files, scalar is in a\.safetensors, short is in"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ours")


def test_a_folder_that_is_only_named_like_one_of_parts_does_not_matter(tmp_path: Path) -> None:
    path = exported(tmp_path)
    (path / "sharded").mkdir()
    (path / "sharded" / "other.safetensors").touch()
    assert equal(imported(path, tmp_path), STATE)


def test_one_file_of_several_is_refused(tmp_path: Path) -> None:
    path = exported(tmp_path)
    with pytest.raises(ForeignCheckpointError, match=r"is one of 4 files: give its folder, .*hf"):
        import_checkpoint(path / "model-00002-of-00004.safetensors", tmp_path / "ours")


def test_several_files_without_an_index_are_read_if_their_names_say_that_they_are_all(tmp_path: Path) -> None:
    path = exported(tmp_path)
    (path / INDEX).unlink()
    assert equal(imported(path, tmp_path), STATE)
    (path / "model-00004-of-00004.safetensors").unlink()
    with pytest.raises(ForeignCheckpointError, match=r"is incomplete: it has 3 of 4 files"):
        import_checkpoint(path, tmp_path / "again")


@pytest.mark.parametrize("name", ["diffusion_model.safetensors.index.json", INDEX])
def test_an_index_of_any_name_is_used(tmp_path: Path, name: str) -> None:
    path = exported(tmp_path)
    (path / INDEX).rename(path / name)
    assert equal(imported(path, tmp_path), STATE)


def test_a_folder_of_several_checkpoints_is_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    for name in ("a", "b"):
        safetensors.save_file(STATE, tmp_path / "hf" / f"{name}.safetensors")
    with pytest.raises(ForeignCheckpointError, match=r"several checkpoints: give one of a\.safetensors, b\.safet"):
        import_checkpoint(tmp_path / "hf", tmp_path / "ours")
    (tmp_path / "hf" / "a.safetensors").unlink()
    assert equal(imported(tmp_path / "hf", tmp_path), STATE)
