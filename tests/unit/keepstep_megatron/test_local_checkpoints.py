"""Local checkpoints: a sharded state in memory, whose tensors are removed, sent, and put in again."""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from keepstep.sharded import CheckpointingException, LocalNonpersistentObject, ShardedObject, ShardedTensor
from keepstep.sharded.tensor_aware_state_dict import MCoreTensorAwareStateDict
from keepstep.sharded.validation import StrictHandling
from tests.support import checkpoints

PYTHONS = [one for one in os.environ.get("KEEPSTEP_MEGATRON_PYTHON", "").split(os.pathsep) if one]
PEER = Path(checkpoints.__file__).parent / "local_peer.py"
whole = ShardedTensor.from_rank_offsets


def state(value):
    """A state of which one tensor is a range of a flattened one."""
    flat = ShardedTensor.from_rank_offsets_flat("f", torch.full((6,), value), (2, 3), flattened_range=slice(0, 6))
    return {
        "w": whole("w", torch.full((2, 3), value)),
        "list": [whole("l", torch.full((2,), value, dtype=torch.bfloat16), (0, 0, 1), prepend_axis_num=1), flat],
        "o": ShardedObject("o", {"seed": value}, (1,), (0,)),
        "local": LocalNonpersistentObject(value),
        "step": value,
    }


def made(value=1.0, algo="fully_parallel"):
    local, _ = MCoreTensorAwareStateDict.from_state_dict(state(value), algo)
    return local


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_a_state_is_loaded_into_the_memory_of_the_request(algo) -> None:
    request = state(0.0)
    loaded = made(2.0, algo).to_state_dict(request, algo)
    assert loaded["w"].data_ptr() == request["w"].data.data_ptr()
    assert loaded["w"].tolist() == [[2.0] * 3] * 2
    assert [one.tolist() for one in loaded["list"]] == [[2.0] * 2, [2.0] * 6]
    assert (loaded["o"], loaded["local"], loaded["step"]) == ({"seed": 2.0}, 0.0, 2.0)


def test_the_callers_state_keeps_its_tensors_and_a_copy_is_not_changed_by_training() -> None:
    before = state(1.0)
    local, _ = MCoreTensorAwareStateDict.from_state_dict(before)
    local.copy_tensors_to_cpu()
    before["w"].data.zero_()
    local.pop_tensors()
    assert before["list"][0].data is not None
    local.init_tensors()
    assert [one.shape for one in local.tensors] == [(2, 3), (2,), (6,)]

    local, _ = MCoreTensorAwareStateDict.from_state_dict(state(1.0))
    local.copy_tensors_to_cpu(non_blocking=True)
    assert local.to_state_dict(state(0.0))["w"].tolist() == [[1.0] * 3] * 2


def test_a_hollow_state_has_no_tensor_and_takes_them_back_in_another_process() -> None:
    local = made(3.0)
    taken = local.pop_tensors()
    packed = pickle.dumps(local)
    assert all(one.numpy(force=True).tobytes() not in packed for one in taken if one.dtype is torch.float32)
    other = pickle.loads(packed)
    other.insert_tensors(taken)
    assert (local.is_hollow, other.is_hollow) == (True, False)
    assert other.common_state_dict == {"step": 3.0}
    assert other.to_state_dict(state(0.0))["w"].tolist() == [[3.0] * 3] * 2
    assert other.to_state_dict({}) == {"step": 3.0}


def test_calls_in_the_wrong_order_say_which_is_needed_first() -> None:
    local = made()
    for call in (lambda: local.insert_tensors([]), local.init_tensors):
        with pytest.raises(CheckpointingException, match="the state has its tensors; call pop_tensors first"):
            call()
    taken = local.pop_tensors()
    for call in (local.pop_tensors, local.copy_tensors_to_cpu, local.restore_tensor_device, lambda: local.tensors):
        with pytest.raises(CheckpointingException, match="the state is hollow; call insert_tensors first"):
            call()
    with pytest.raises(CheckpointingException, match="the state is hollow"):
        local.to_state_dict(state(0.0))
    with pytest.raises(CheckpointingException, match="2 tensors were given to a state of 3"):
        local.insert_tensors(taken[1:])
    with pytest.raises(CheckpointingException, match=r"'w' has shape \(2, 3\) and dtype torch.float32, but a tensor"):
        local.insert_tensors(taken[::-1])
    assert local.is_hollow
    local.insert_tensors(taken)
    with pytest.raises(NotImplementedError, match="invalid algo 'other': expected one of atomic, fully_parallel"):
        local.to_state_dict(state(0.0), "other")


def test_tensors_of_another_device_return_to_it() -> None:
    """The meta device stands for an accelerator: tensors move from it, though without values."""
    local, _ = MCoreTensorAwareStateDict.from_state_dict({"w": whole("w", torch.empty(3, device="meta"))}, "atomic")
    local.pop_tensors()
    local.insert_tensors([torch.ones(3)])
    local.copy_tensors_to_cpu()
    taken = local.pop_tensors()
    local.insert_tensors(taken)
    local.restore_tensor_device()
    assert [one.device.type for one in local.tensors] == ["meta"]
    local.pop_tensors()
    local.init_tensors()
    assert [one.device.type for one in local.tensors] == ["meta"]


@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_a_key_that_only_the_local_checkpoint_has_is_treated_as_by_a_load(algo) -> None:
    request = state(0.0)
    del request["w"]
    found = made(5.0, algo).to_state_dict(request, algo, strict="return_all", return_mismatch_keys=True)
    assert (found[0]["o"], found[1:]) == ({"seed": 5.0}, ({"w"}, set()))
    with pytest.raises(CheckpointingException, match="the local checkpoint was not loaded: Missing keys"):
        made(5.0, algo).to_state_dict(request, algo, strict="raise_all")


@pytest.mark.parametrize("strict", StrictHandling)
@pytest.mark.parametrize("algo", ["atomic", "fully_parallel"])
def test_a_key_that_only_the_request_has_is_an_error_whatever_strict_says(algo, strict) -> None:
    request = {**state(0.0), "extra": whole("extra", torch.zeros(1))}
    with pytest.raises(CheckpointingException, match="extra") as failed:
        made(5.0, algo).to_state_dict(request, algo, strict=strict)
    assert isinstance(failed.value, AssertionError), "as that of Megatron Core"


def test_parts_that_this_rank_does_not_hold_are_an_error() -> None:
    half = lambda at: {"w": ShardedTensor("w", torch.ones(2), torch.float32, (2,), (4,), (at,), (2,), replica_id=at)}  # noqa: E731
    local, _ = MCoreTensorAwareStateDict.from_state_dict({**half(0), "other": half(2)["w"]} | {}, "atomic", None, ())
    local.sharded_state_dict.pop("other")
    with pytest.raises(CheckpointingException, match=r"this rank does not hold all of \[2:4\] of 'w'"):
        local.to_state_dict(half(2), validate_access_integrity=False)


def run(python, library, ranks, folder):
    environment = dict(os.environ)
    if library == "keepstep":
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    said = subprocess.run(
        [python, str(PEER), library, str(ranks), str(folder)],
        env=environment,
        check=False,
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    return [json.loads((folder / f"{library}-{rank}.json").read_text()) for rank in range(ranks)]


def expected(rank, ranks):
    tp = 2 if ranks % 2 == 0 else 1
    full = lambda start, *shape: torch.arange(start, start + torch.Size(shape).numel()).view(shape).float().tolist()  # noqa: E731
    return {
        "cut": ["torch.float32", full(100 * (rank % tp), 4, 3)],
        "half": ["torch.bfloat16", full(7, 5)],
        "layers": [["torch.float32", full(at, 2)] for at in range(3)],
        "own": ["torch.float32", full(rank, 2)],
        "fused": ["torch.float32", full(50, 4, 2)],
        "random": rank,
        "mine": f"rank {rank}",
        "step": 3,
    }


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_what_they_hold_and_send_it_to_each_other(tmp_path, ranks) -> None:
    seen = run(sys.executable, "keepstep", ranks, tmp_path)
    tensors = {algo: [len(one[f"{algo} holds"]) for one in seen] for algo in ("atomic", "fully_parallel")}
    assert tensors["atomic"] == [8] * ranks
    assert sum(tensors["fully_parallel"]) == 6 + ranks + (2 if ranks == 2 else 1), "each part once"
    for rank, one in enumerate(seen):
        for algo, held in tensors.items():
            assert one[f"{algo} holds with the metadata of before"] == held[rank]
            assert one[f"{algo} hollow"] == [True, True]
            assert one[f"{algo} common"] == {"step": 3}
            for exchange in ("broadcast", "gather_object"):
                assert one[f"{algo} {exchange}"] == expected(rank, ranks)
            if importlib.util.find_spec("nvidia_resiliency_ext"):
                assert one[f"{algo} is one"]
                assert one[f"{algo} finalized"] == [[0], 0]
                assert (one[f"{algo} latest"], one[f"{algo} stored"]) == (5, expected(rank, ranks))


@pytest.mark.skipif(not PYTHONS, reason="KEEPSTEP_MEGATRON_PYTHON is not set: docs/testing.md, beside Megatron Core")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_each_rank_sees_what_it_sees_with_megatron_core(tmp_path, python, ranks) -> None:
    """Starts up to eight processes."""
    find = "import importlib.util as one, sys; sys.exit(one.find_spec('nvidia_resiliency_ext') is None)"
    if subprocess.run([python, "-c", find], check=False).returncode:
        pytest.skip(f"{python} has no nvidia-resiliency-ext: Megatron Core makes no local checkpoint without it")
    ours, theirs = run(sys.executable, "keepstep", ranks, tmp_path), run(python, "megatron", ranks, tmp_path)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == {key: other.get(key) for key in mine}
