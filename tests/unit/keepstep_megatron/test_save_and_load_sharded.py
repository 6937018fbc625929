"""Save and load of a sharded state by one rank, in each format."""

from __future__ import annotations

import argparse
import json
import pickle
import warnings
from argparse import Namespace
from collections import deque
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from numpy._core import multiarray

from keepstep.checkpoint.places.durable_files import write_file
from keepstep.sharded import (
    AsyncCallsQueue,
    CheckpointingException,
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    check_is_distributed_checkpoint,
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_sharded_objects,
    load_tensors_metadata,
    save,
)
from keepstep.sharded.strategies import (
    CommonFileLoad,
    CommonFileSave,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from keepstep_megatron.pieces import boxes_of_range
from keepstep_mesh.protocol.boxes import whole as whole_box

KEEPSTEP, TORCH_DIST = ("keepstep", 1), ("torch_dist", 1)
FORMATS = [KEEPSTEP, TORCH_DIST]
whole = ShardedTensor.from_rank_offsets


def halves(key, data, replica_id):
    upper, lower = data.chunk(2)
    return {"upper": whole(f"{key}.upper", upper, replica_id=replica_id), "lower": [whole(f"{key}.lower", lower)]}


def fused(data):
    return ShardedTensorFactory("fused", data, halves, lambda parts: torch.cat([parts["upper"], *parts["lower"]]))


@pytest.mark.parametrize("form", FORMATS)
def test_what_was_saved_is_loaded_into_the_structure_that_is_asked_for(tmp_path, form) -> None:
    weight, random = torch.randn(4, 6), ShardedObject("rng", {"seed": (1, 2)}, (1,), (0,))
    state = {
        "model": {
            "w": whole("weight", weight),
            "layers": [whole("layers", torch.ones(3), (0, 0, 1), prepend_axis_num=1)],
        },
        "fused": fused(torch.arange(8.0).view(4, 2)),
        "rng": random,
        "local": LocalNonpersistentObject("saved"),
        "step": 7,
        "groups": [{"lr": 0.5, "betas": (0.9, 0.95)}],
    }
    save(state, tmp_path, form, content_metadata={"version": 2})
    assert isinstance(state["fused"], ShardedTensorFactory), "the state of the caller is not changed"

    target = torch.zeros(4, 6, dtype=torch.float64)
    request = {
        "other": [whole("weight", target)],
        "layers": whole("layers", torch.zeros(1, 3)),
        "fused": fused(torch.zeros(4, 2)),
        "rng": ShardedObject("rng", None, (1,), (0,)),
        "local": LocalNonpersistentObject("loaded"),
    }
    loaded = load(request, tmp_path)
    assert torch.equal(target, weight.double()), "loaded in place, in the dtype of the request"
    assert loaded["other"][0].data_ptr() == target.data_ptr()
    assert torch.equal(loaded["fused"], torch.arange(8.0).view(4, 2))
    assert torch.equal(loaded["layers"], torch.ones(1, 3))
    assert (loaded["rng"], loaded["local"], loaded["step"]) == ({"seed": (1, 2)}, "loaded", 7)
    assert loaded["groups"] == [{"lr": 0.5, "betas": (0.9, 0.95)}]
    assert load_content_metadata(tmp_path) == {"version": 2}
    assert load_common_state_dict(tmp_path)["step"] == 7
    assert load_sharded_objects({"a": random.without_data()}, tmp_path) == {"a": {"seed": (1, 2)}}
    assert load_tensors_metadata(tmp_path)["layers"].global_shape == (1, 3)
    plain = load_plain_tensors(tmp_path)
    assert set(load_sharded_metadata(tmp_path)) == {*plain, "rng/shard_0_1"}
    assert torch.equal(plain["fused.lower"], torch.tensor([[4.0, 5.0], [6.0, 7.0]]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("form", FORMATS)
def test_every_dtype_and_shape_is_loaded(tmp_path, form, dtype) -> None:
    tensors = {"scalar": torch.ones(()), "empty": torch.ones(0, 3), "wide": torch.arange(6).view(2, 3).T}
    tensors = {key: one.to(dtype) for key, one in tensors.items()}
    save({key: whole(key, one) for key, one in tensors.items()}, tmp_path, form)
    for key, one in load_plain_tensors(tmp_path).items():
        assert one.dtype is dtype
        assert one.shape == tensors[key].shape
        assert torch.equal(one.to(torch.complex64), tensors[key].to(torch.complex64))


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (3, 1, 2)])
def test_the_boxes_of_a_range_hold_its_elements_in_order(shape) -> None:
    elements = torch.arange(torch.Size(shape).numel()).view(shape)
    for start in range(elements.numel() + 1):
        for stop in range(start, elements.numel() + 1):
            boxes = list(boxes_of_range(shape, start, stop))
            found = [elements[box.within(whole_box(shape))].flatten() for box in boxes]
            assert torch.cat([torch.empty(0), *found]).tolist() == list(range(start, stop))
            assert len(boxes) < 2 * len(shape)


@pytest.mark.parametrize("form", FORMATS)
def test_flattened_ranges_are_loaded_under_any_other_split(tmp_path, form) -> None:
    values = torch.arange(24.0)

    def flat(start, stop, data):
        return ShardedTensor.from_rank_offsets_flat("w", data, (2, 3, 4), flattened_range=slice(start, stop))

    cuts = [0, 5, 10, 15, 24]
    save({str(a): flat(a, b, values[a:b]) for a, b in pairwise(cuts)}, tmp_path, form)
    loaded = load({"a": flat(0, 7, torch.zeros(7)), "b": flat(7, 24, torch.zeros(17))}, tmp_path)
    assert torch.equal(torch.cat([loaded["a"], loaded["b"]]), values)
    assert torch.equal(load_plain_tensors(tmp_path)["w"], values.view(2, 3, 4))


@pytest.mark.parametrize("form", FORMATS)
def test_a_padded_tensor_is_loaded_with_zeros_in_the_rest(tmp_path, form) -> None:
    save({"v": whole("vocabulary", torch.ones(4, 2))}, tmp_path, form)
    target = torch.full((6, 2), 9.0)
    with pytest.raises(CheckpointingException, match=r"Global shape mismatch: 'vocabulary' has shape \(4, 2\)"):
        load({"v": whole("vocabulary", target)}, tmp_path)
    load({"v": whole("vocabulary", target, allow_shape_mismatch=True)}, tmp_path)
    assert torch.equal(target, torch.cat([torch.ones(4, 2), torch.zeros(2, 2)]))
    smaller = load({"v": whole("vocabulary", torch.zeros(3, 2), allow_shape_mismatch=True)}, tmp_path)
    assert torch.equal(smaller["v"], torch.ones(3, 2))


@pytest.mark.parametrize("form", FORMATS)
def test_keys_of_one_side_are_handled_as_told(tmp_path, form) -> None:
    save({"a": whole("a", torch.ones(2)), "b": whole("b", torch.ones(2))}, tmp_path, form)

    def asked(strict):
        return load({"a": whole("a", torch.zeros(2)), "c": whole("c", torch.zeros(2))}, tmp_path, strict=strict)

    for strict in ("assume_ok_unexpected", "raise_unexpected", "raise_all"):
        with pytest.raises(CheckpointingException, match=r"does not have:? c\b"):
            asked(strict)
    with pytest.raises(CheckpointingException, match="which no rank requests: b"):
        asked("raise_all")
    assert set(asked("ignore_all")) == set(asked("log_all")) == {"a"}
    state, missing, unexpected = asked("return_all")
    assert (set(state), missing, unexpected) == ({"a"}, {"b"}, {"c"})


@pytest.mark.parametrize("form", FORMATS)
def test_a_flipped_byte_is_named_with_its_file_and_key(tmp_path, form) -> None:
    save(
        {"weight": whole("weight", torch.arange(1000.0)), "rng": ShardedObject("rng", "state", (1,), (0,))},
        tmp_path,
        form,
    )
    (file,) = [one for pattern in ("pack-0", "__0_0.distcp") for one in tmp_path.glob(pattern)]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointingException, match=rf"weight.*{file.name}|{file.name}.*weight"):
        load({"weight": whole("weight", torch.zeros(1000))}, tmp_path)


@pytest.mark.parametrize("form", FORMATS)
def test_a_background_save_has_the_values_at_its_call(tmp_path, form) -> None:
    values, queue = torch.ones(4), AsyncCallsQueue()
    request = save(
        {"w": whole("w", values), "o": ShardedObject("o", [1], (1,), (0,))}, tmp_path, form, async_sharded_save=True
    )
    assert not check_is_distributed_checkpoint(tmp_path)
    values.zero_()
    assert queue.schedule_async_request(request) == 0
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert torch.equal(load_plain_tensors(tmp_path)["w"], torch.ones(4))
    assert queue.get_num_unfinalized_calls() == 0


@pytest.mark.parametrize("form", FORMATS)
def test_a_complete_checkpoint_is_never_overwritten_and_an_incomplete_one_is_never_loaded(tmp_path, form) -> None:
    save({"w": whole("w", torch.ones(4))}, tmp_path / "one", form)
    for other in FORMATS:
        with pytest.raises(CheckpointingException, match="never overwritten"):
            save({"w": whole("w", torch.zeros(4))}, tmp_path / "one", other)
    for name in ("metadata.json", "checkpoint.json"):
        (tmp_path / "one" / name).unlink(missing_ok=True)
    with pytest.raises(CheckpointingException, match=r"is not a distributed checkpoint: it has no metadata"):
        load_plain_tensors(tmp_path / "one")
    save({"w": whole("w", torch.zeros(4))}, tmp_path / "one", form)
    assert torch.equal(load_plain_tensors(tmp_path / "one")["w"], torch.zeros(4))


def test_a_directory_whose_save_ended_before_its_last_file_is_complete_in_keepsteps_format(tmp_path) -> None:
    save({"w": whole("w", torch.ones(4)), "step": 3}, tmp_path)
    (tmp_path / "metadata.json").unlink()
    assert load({"w": whole("w", torch.zeros(4))}, tmp_path)["step"] == 3


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_plain_dcp_reads_a_torch_dist_directory(tmp_path) -> None:
    save({"a": whole("a", torch.arange(6.0).view(2, 3)), "step": 1}, tmp_path, TORCH_DIST)
    state = {"a": torch.zeros(2, 3)}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert torch.equal(state["a"], torch.arange(6.0).view(2, 3))
    assert json.loads((tmp_path / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_a_state_without_a_file_of_its_own_is_an_object(tmp_path) -> None:
    """Megatron Core 0.19 stores it so."""
    common = ShardedObject("common_state", {"iteration": 5, "args": argparse.Namespace(layers=2)}, (1,), (0,))
    save({"w": whole("w", torch.ones(2)), "common": common}, tmp_path, TORCH_DIST)
    (tmp_path / "common.pt").unlink()
    loaded = load({"w": whole("w", torch.zeros(2))}, tmp_path, strict="raise_all")
    assert (loaded["iteration"], loaded["args"].layers, loaded["w"].tolist()) == (5, 2, [1.0, 1.0])


def test_padding_that_was_not_stored_is_an_error_only_if_it_is_wanted(tmp_path) -> None:
    """Megatron Core 0.19 leaves padding of its distributed optimizer out."""

    def part(start, stop, size):
        data = torch.arange(float(start), stop)
        return ShardedTensor("w", data, data.dtype, (stop - start,), (size,), (start,), None)

    save({"parts": [part(0, 6, 9), part(6, 9, 9)]}, tmp_path, TORCH_DIST)
    path = tmp_path / ".metadata"
    metadata = pickle.loads(path.read_bytes())  # a file that this test has made
    metadata.state_dict_metadata["w"].chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    request = part(0, 5, 9).without_data()
    assert load({"w": request}, tmp_path, validate_access_integrity=False)["w"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(CheckpointingException, match=r"does not have all of \[5:8\] of 'w': its shards have 1 of 3"):
        load({"w": part(5, 8, 9)}, tmp_path, validate_access_integrity=False)
    with pytest.raises(CheckpointingException, match=r"does not have all of \[0:9\] of 'w'"):
        load_plain_tensors(tmp_path)


@pytest.mark.parametrize("value", [deque([1]), partial(sum, [1])], ids=["deque", "partial"])
@pytest.mark.parametrize("is_object", [True, False], ids=["object", "common"])
def test_a_value_that_a_load_would_refuse_is_refused_by_the_save(tmp_path, value, is_object) -> None:
    state = {"v": ShardedObject("v", value, (1,), (0,)) if is_object else value}
    with pytest.raises(CheckpointingException, match=r"load would refuse what is saved.*add_safe_globals"):
        save(state, tmp_path, TORCH_DIST)
    assert not check_is_distributed_checkpoint(tmp_path)


def test_code_in_a_checkpoint_is_run_only_if_the_load_allows_it(tmp_path) -> None:
    state = {"common": partial(sum, [1]), "o": ShardedObject("o", partial(sum, [2]), (1,), (0,))}
    trusting = TorchDistSaveShardedStrategy(allow_pickle=True), CommonFileSave(allow_pickle=True)
    save(state, tmp_path, *trusting)
    with pytest.raises(CheckpointingException, match=r"functools\.partial"):
        load_common_state_dict(tmp_path)
    request = {"o": ShardedObject("o", None, (1,), (0,))}
    loaded = load(request, tmp_path, TorchDistLoadShardedStrategy(allow_pickle=True), CommonFileLoad(allow_pickle=True))
    assert (loaded["common"](), loaded["o"]()) == (1, 2)


def test_numpy_values_are_loaded_whatever_the_process_allows_torch(tmp_path) -> None:
    known = torch.serialization.get_safe_globals()
    objects = np.array([{"a": 1}, None], dtype=object)
    named = np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")])
    plain = {"array": np.arange(3), "scalar": np.float64(2.5), "state": np.random.RandomState(0).get_state()}
    allowed = [multiarray._reconstruct, multiarray.scalar, np.ndarray, np.dtype, Namespace]
    allowed += [type(np.dtype(one)) for one in ("i4", "f8", "O", named.dtype)]
    try:
        torch.serialization.add_safe_globals(allowed)
        save({"o": ShardedObject("o", [objects, named], (1,), (0,)), **plain}, tmp_path, TORCH_DIST)
        loaded = load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)
        assert set(allowed) <= set(torch.serialization.get_safe_globals()), "a load took back what the process allows"
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(known)
    assert loaded["o"][0].tolist() == objects.tolist()
    assert loaded["o"][1] == named
    assert loaded["array"].tolist() == [0, 1, 2]
    assert type(loaded["scalar"]) is np.float64
    assert loaded["scalar"] == 2.5
    assert np.array_equal(loaded["state"][1], plain["state"][1])
    with pytest.raises(CheckpointingException, match="numpy"):
        load({"o": ShardedObject("o", None, (1,), (0,))}, tmp_path)


def test_a_value_that_cannot_be_stored_is_named_and_nothing_is_visible(tmp_path) -> None:
    with pytest.raises(CheckpointingException, match="path"):
        save({"w": whole("w", torch.ones(2)), "path": object()}, tmp_path)
    assert not check_is_distributed_checkpoint(tmp_path)


def test_a_damaged_record_is_an_error(tmp_path) -> None:
    save({"w": whole("w", torch.ones(2))}, tmp_path)
    write_file(tmp_path / "metadata.json", b"{")
    with pytest.raises(CheckpointingException, match=r"invalid metadata\.json: not JSON"):
        load_common_state_dict(tmp_path)


def test_a_backend_that_is_not_registered_is_named(tmp_path) -> None:
    with pytest.raises(
        CheckpointingException, match=r"Cannot find a default strategy for: \('save_sharded', 'zip', 1\); registered"
    ):
        save({}, tmp_path, ("zip", 1))


@pytest.mark.parametrize("form", FORMATS)
def test_a_part_without_elements_does_not_hide_the_one_after_it(tmp_path, form) -> None:
    data = torch.arange(8.0)
    parts = [
        ShardedTensor("w", data[start:stop].clone(), data.dtype, (stop - start,), (8,), (start,), None)
        for start, stop in ((0, 3), (3, 3), (3, 8))
    ]
    save({"parts": parts}, tmp_path, form)
    assert torch.equal(load_plain_tensors(tmp_path)["w"], data)


@pytest.mark.parametrize("form", FORMATS)
def test_a_factory_in_a_list_keeps_its_function_if_one_before_it_is_left_out(tmp_path, form) -> None:
    def factory(key, scale):
        return ShardedTensorFactory(key, torch.ones(4), halves, lambda parts: torch.cat([*parts["lower"]]) * scale)

    save({"list": [factory("b", 1)]}, tmp_path, form)
    state, _, unexpected = load({"list": [factory("a", 2), factory("b", 3)]}, tmp_path, strict="return_unexpected")
    assert torch.equal(state["list"][0], torch.full((2,), 3.0))
    assert unexpected == {"a.upper", "a.lower"}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    "values",
    [
        [5, whole("a", torch.ones(2))],
        [LocalNonpersistentObject(5), fused(torch.ones(4))],
        [{"n": 5}, {"a": [whole("a", torch.ones(2))]}],
    ],
)
def test_a_list_that_could_not_be_put_together_again_is_not_saved(tmp_path, form, values) -> None:
    with pytest.raises(CheckpointingException, match=r"cannot save the list at x\.list: its values are of different k"):
        save({"x": {"list": values}}, tmp_path, form)
    with pytest.raises(CheckpointingException, match="cannot save a list: expected a dict"):
        save([1], tmp_path, form)


@pytest.mark.parametrize("form", FORMATS)
def test_an_object_and_a_tensor_do_not_replace_each_other(tmp_path, form) -> None:
    state = {"o": ShardedObject("rng", 5, (1,), (0,)), "t": whole("rng/shard_0_1", torch.ones(2))}
    with pytest.raises(CheckpointingException, match="'rng/shard_0_1': an object and a tensor are stored under this"):
        save(state, tmp_path, form)


@pytest.mark.parametrize("form", FORMATS)
def test_a_checkpoint_of_dcp_is_not_overwritten(tmp_path, form) -> None:
    with warnings.catch_warnings(action="ignore"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    before = sorted((one.name, one.read_bytes()) for one in tmp_path.iterdir())
    with pytest.raises(CheckpointingException, match=r"has a checkpoint of torch\.distributed\.checkpoint, which is"):
        save({"w": whole("w", torch.zeros(3))}, tmp_path, form)
    assert sorted((one.name, one.read_bytes()) for one in tmp_path.iterdir()) == before


def test_an_object_does_not_take_the_key_of_the_common_values(tmp_path) -> None:
    state = {"o": ShardedObject("common_state", 5, (1,), (0,), replica_id=1), "n": 1}  # its main replica: another rank
    with pytest.raises(CheckpointingException, match="'common_state' has the key of the values without sharding: ren"):
        save(state, tmp_path, validate_access_integrity=False)
