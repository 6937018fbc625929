"""Requests of which a checkpoint has only a part, and checkpoints that were not saved as sharded state."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

from keepstep import checkpoint
from keepstep.sharded import (
    CheckpointingException,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    load,
    load_common_state_dict,
    load_plain_tensors,
    load_sharded_metadata,
    save,
)
from keepstep.sharded.strategies import TorchDistSaveShardedStrategy

FORMATS = [("keepstep", 1), ("torch_dist", 1)]
whole = ShardedTensor.from_rank_offsets


def flat(start, stop, *, data=True):
    values = torch.zeros(stop - start)
    one = ShardedTensor.from_rank_offsets_flat("w", values, (2, 3), flattened_range=slice(start, stop))
    return one if data else one.without_data()


@pytest.mark.parametrize("form", FORMATS)
def test_a_range_without_elements_has_its_place_in_the_loaded_state(tmp_path, form) -> None:
    save({"w": whole("w", torch.arange(6.0).view(2, 3))}, tmp_path, form)
    request = {"list": [flat(0, 0), flat(0, 6), flat(6, 6, data=False)], "none": {"w": flat(3, 3)}}
    loaded = load(request, tmp_path, strict="raise_all")
    assert [one.tolist() for one in loaded["list"]] == [[], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], []]
    assert loaded["none"]["w"].shape == (0,)


@pytest.mark.parametrize("form", FORMATS)
def test_a_factory_whose_keys_are_stored_in_part_is_named_before_anything_is_loaded(tmp_path, form) -> None:
    def build(key, data, replica_id):
        return {"low": whole(f"{key}.low", data[:2]), "high": whole(f"{key}.high", data[2:], replica_id=replica_id)}

    save({"low": whole("f.low", torch.ones(2)), "w": whole("w", torch.ones(2))}, tmp_path, form)
    target = torch.zeros(2)
    factory = ShardedTensorFactory("f", torch.zeros(4), build, lambda parts: torch.cat([parts["low"], parts["high"]]))
    with pytest.raises(CheckpointingException, match=r"'f' cannot be merged: .* some of its keys, but not f\.h"):
        load({"f": factory, "w": whole("w", target)}, tmp_path, strict="return_all")
    assert target.tolist() == [0, 0]


@pytest.mark.parametrize("form", FORMATS)
def test_imaginary_parts_are_never_dropped(tmp_path, form) -> None:
    save({"c": whole("c", torch.tensor([1 + 2j]))}, tmp_path, form)
    with pytest.raises(CheckpointingException, match=r"'c' is torch\.complex64 in the checkpoint, but torch\.float32"):
        load({"c": whole("c", torch.zeros(1))}, tmp_path)
    loaded = load({"c": whole("c", torch.zeros(1, dtype=torch.complex128))}, tmp_path)
    assert loaded["c"].tolist() == [1 + 2j]


def test_plain_values_of_a_checkpoint_that_was_not_sharded_are_common(tmp_path) -> None:
    checkpoint.save({"w": torch.ones(2), "step": 3, "options": {"lr": 0.5, "names": ["a"]}}, tmp_path / "one")
    loaded = load({"w": whole("w", torch.zeros(2))}, tmp_path / "one", strict="raise_all")
    assert {**loaded, "w": loaded["w"].tolist()} == {"w": [1, 1], "step": 3, "options": {"lr": 0.5, "names": ["a"]}}
    assert set(load_sharded_metadata(tmp_path / "one")) == set(load_plain_tensors(tmp_path / "one")) == {"w"}


def test_common_values_are_not_those_of_objects(tmp_path) -> None:
    save({"o": ShardedObject("o", 5, (1,), (0,)), "step": 3}, tmp_path)
    assert load_common_state_dict(tmp_path) == {"step": 3}


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"keep_only_main_replica": False}, "keep_only_main_replica is False, but only main replicas are written"),
        ({"separation_hint": "o", "thread_count": 1}, "invalid separation_hint 'o' with thread_count 1: expected"),
        ({"separation_hint": "o/p"}, "invalid separation_hint 'o/p' with thread_count 2: expected the beginning of a"),
        ({"thread_count": 0}, "invalid thread_count 0: expected at least 1 file"),
    ],
)
def test_an_option_of_megatron_that_has_no_meaning_is_refused(argument, text) -> None:
    with pytest.raises(CheckpointingException, match=text):
        TorchDistSaveShardedStrategy("torch_dist", 1, **argument)
    TorchDistSaveShardedStrategy("torch_dist", 1, True, 2, True, None)  # as Megatron Core takes them


def test_values_whose_keys_begin_with_the_hint_are_in_files_of_their_own(tmp_path) -> None:
    keys = [f"{kind}.{number}" for kind in ("model", "optimizer") for number in range(3)]
    state = {key: ShardedTensor.from_rank_offsets(key, torch.full((3,), 2.0)) for key in keys}
    state["optimizer.rng"] = ShardedObject("optimizer.rng", 7, (1,), (0,))
    strategy = TorchDistSaveShardedStrategy(thread_count=4, separation_hint="optimizer")
    save(state, tmp_path, strategy)
    (tmp_path / "metadata.json").unlink()
    save(state, tmp_path, strategy)  # removes the files of before
    files = {one.name: one.read_bytes() for one in tmp_path.glob("*.distcp")}
    assert sorted(files) == ["__0_0.distcp", "__0_1.distcp", "optimizer__0_2.distcp", "optimizer__0_3.distcp"]
    where = {
        index.fqn: info.relative_path
        for index, info in dcp.FileSystemReader(tmp_path).read_metadata().storage_data.items()
    }
    assert {name.startswith("optimizer") for key, name in where.items() if key.startswith("optimizer")} == {True}
    assert {name.startswith("optimizer") for key, name in where.items() if key.startswith("model")} == {False}
    loaded = load({key: one.without_data() for key, one in state.items()}, tmp_path, strict="raise_all")
    assert loaded.pop("optimizer.rng") == 7
    assert all(one.tolist() == [2.0] * 3 for one in loaded.values())
