"""One of four ranks that save and load sharded state together. Some of them are killed at the end.

sharded_job.py RANK FOLDER RELAY
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from keepstep.sharded import (
    AsyncCallsQueue,
    AsyncRequest,
    CheckpointingException,
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    check_is_distributed_checkpoint,
    load,
    load_plain_tensors,
    save,
    validate_sharding_integrity,
)
from keepstep.sharded.dict_utils import nested_values
from keepstep.sharded.strategies import (
    NativeLoadStrategy,
    NativeSaveStrategy,
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)
from keepstep.sharded.validation import determine_global_metadata

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # a script, which may start without the tests' folder

from tests.support.models.parallel_transformer import Job

FORMATS: list[tuple[str, int]] = [("keepstep", 1), ("torch_dist", 1)]
rank, folder, relay = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
worlds = 0


@contextmanager
def world(*members: int) -> Any:
    """Be in a process group of ``members``; yield whether this process is one of them."""
    global worlds
    worlds += 1
    if rank not in members:
        yield False
        return
    store = dist.FileStore(str(folder / f"store-{worlds}"), len(members))
    dist.init_process_group("gloo", store=store, rank=members.index(rank), world_size=len(members))
    yield True
    dist.destroy_process_group()


def refused(work: Callable[[], object]) -> str:
    try:
        work()
    except CheckpointingException as error:
        return str(error)
    raise AssertionError("it was not refused")


def part(key: str, data: torch.Tensor, *, replicated: bool = False, replica: int | None = None) -> ShardedTensor:
    """One half of a tensor, or a copy of it."""
    at = dist.get_rank()
    if replicated:
        return ShardedTensor.from_rank_offsets(key, data, replica_id=at if replica is None else replica)
    return ShardedTensor.from_rank_offsets(key, data, (0, at, 2), replica_id=replica or 0)


# ---- two ranks


def every_rank_refuses_what_one_of_them_has_wrong() -> None:
    at, form = dist.get_rank(), FORMATS[0]
    uncovered = lambda: save({"w": part("w", torch.ones(4), replica=at)}, folder / "bad", form)  # noqa: E731
    assert "'w': chunk [4:8] has no main replica" in refused(uncovered), refused(uncovered)
    twice = [part("v", torch.ones(4), replicated=True, replica=0)]
    everyone = determine_global_metadata({"v": twice})[1]
    shared = refused(partial(validate_sharding_integrity, everyone))
    assert "'v': chunk [0:4] has 2 main replicas, on ranks 0, 1" in shared, shared
    for one in FORMATS:
        copies = {"w": part("w", torch.full((4,), float(at)), replicated=True)}
        save(copies, folder / f"copies-{one[0]}", one)
        differing = refused(partial(save, copies, folder / "bad", one, check_replicas=True))
        assert "'w' [0:4] differs between ranks 0 and 1" in differing, differing
        differing = refused(partial(save, {"step": at}, folder / "bad", one, check_replicas=True))
        assert "Mismatched keys: [(('step',), <class 'int'>, <class 'int'>)]" in differing, differing
        local = {"w": part("w", torch.ones(4)), "o": ShardedObject("o", lambda: 0 if at else 1, (2,), (at,))}
        failed = refused(partial(save, local, folder / "bad", one))
        assert "o/shard_" in failed or "local object" in failed, failed
        assert not check_is_distributed_checkpoint(folder / "bad")
        unknown = refused(partial(save, {}, folder / "bad", ("none", 1) if at else one))
        assert "Cannot find a default strategy for: ('save_sharded', 'none', 1)" in unknown, unknown
        invalid: Any = partial(load, {}, folder / f"copies-{one[0]}", strict="none" if at else "raise_all")
        assert "Invalid strict flag 'none'" in refused(invalid)
        elsewhere = partial(save, {}, "http://127.0.0.1:1/v1/none" if at else folder / "bad")
        assert "but rank 1 to 'http://127.0.0.1:1/v1/none'" in refused(elsewhere)
        apart = refused(partial(save, {}, folder / f"apart-{at}", one))
        assert "apart-0', but rank 1 to '" in apart, apart
        mute = partial(save, {"w": ShardedTensorFactory("w", torch.ones(4), fails_on_one, torch.cat)}, folder / "bad")
        assert "its text cannot be shown" in refused(mute)


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def fails_on_one(key: str, data: torch.Tensor, _: object) -> dict[str, ShardedTensor]:
    if dist.get_rank():
        raise WithoutText
    return {"w": part(key, data)}


def a_damaged_part_of_one_rank_is_an_error_of_both() -> None:
    for form, files in zip(FORMATS, ("pack-1", "__1_*"), strict=True):
        path = folder / f"damaged-{form[0]}"
        save({"w": part("w", torch.arange(500.0))}, path, form)
        if dist.get_rank() == 0:
            (file,) = path.glob(files)
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        dist.barrier()
        text = refused(partial(load, {"w": part("w", torch.zeros(500))}, path))
        assert "w" in text, text
        assert files[:6].strip("*") in text, text


class LoadsMainReplicas(NativeLoadStrategy):
    def load(self, sharded_state_dict: Any, checkpoint_dir: Any) -> Any:
        tensors = [one for one in nested_values(sharded_state_dict) if isinstance(one, ShardedTensor)]
        assert [one.replica_id for one in tensors] == [0] * len(tensors), "a strategy may load no others"
        return super().load(sharded_state_dict, checkpoint_dir)


def ranks_share_what_they_hold_both() -> None:
    at = dist.get_rank()
    for form, saver, loader in (
        (FORMATS[0], NativeSaveStrategy(), LoadsMainReplicas()),
        (FORMATS[1], TorchDistSaveShardedStrategy(), TorchDistLoadShardedStrategy()),
    ):
        path = folder / f"shared-{form[0]}"
        values = {key: part(key, torch.full((100,), 3.0), replicated=True) for key in "abcd"}
        state = {**values, "o": ShardedObject("o", "state", (1,), (0,), at), "half": part("half", torch.full((2,), at))}
        save(state, path, FullyParallelSaveStrategyWrapper(saver))
        size = (path / "pack-1" if form[0] == "keepstep" else path / "__1_0.distcp").stat().st_size
        assert size >= 800, f"rank 1 writes half of the copies, not {size} bytes"
        targets = {key: part(key, torch.zeros(100), replicated=True) for key in "abcd"}
        request = {**targets, "o": ShardedObject("o", None, (1,), (0,), at), "half": part("half", torch.zeros(2))}
        loaded: Any = load(request, path, FullyParallelLoadStrategyWrapper(loader))
        assert all(torch.equal(cast("torch.Tensor", one.data), torch.full((100,), 3.0)) for one in targets.values()), (
            "loaded in place"
        )
        assert (loaded["o"], loaded["half"].tolist()) == ("state", [at, at])


@contextmanager
def counted(*names: str) -> Any:
    """Count the calls of collectives of torch in a block."""
    counts, usual = dict.fromkeys(names, 0), {name: getattr(dist, name) for name in names}

    def counting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return usual[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    yield counts
    for name, function in usual.items():
        setattr(dist, name, function)


def ranks_exchange_what_they_read_by_each_algorithm() -> None:
    path = folder / "algorithms"
    tensors = {str(n): torch.arange(n).to((torch.float32, torch.bfloat16, torch.bool)[n % 3]) for n in range(7)}
    tensors["scalar"] = torch.tensor(4.0)
    save({key: part(key, one, replicated=True) for key, one in tensors.items()}, path)
    exchanges = {}
    for algo in ("broadcast", "gather_rounds", "gather_object"):
        loader = FullyParallelLoadStrategyWrapper(NativeLoadStrategy(), None, True, algo)
        for has_memory in (True, False, True):
            request = {key: part(key, torch.zeros_like(one), replicated=True) for key, one in tensors.items()}
            wanted: Any = request if has_memory else {key: one.without_data() for key, one in request.items()}
            with counted("broadcast", "all_gather") as counts:
                loaded: Any = load(wanted, path, loader, validate_access_integrity=False)
            assert all(torch.equal(loaded[key], one) for key, one in tensors.items()), (algo, has_memory)
        exchanges[algo] = counts["broadcast"], counts["all_gather"]
    assert exchanges == {"broadcast": (8, 2), "gather_rounds": (0, 2 + 5), "gather_object": (0, 2 + 1)}, exchanges
    assert "expected one of broadcast, gather_rounds, gather_object" in refused(
        lambda: FullyParallelLoadStrategyWrapper(NativeLoadStrategy(), exchange_algo="none")
    )


def a_kept_assignment_is_used_without_asking_the_other_rank() -> None:
    at = dist.get_rank()
    wrapper = FullyParallelSaveStrategyWrapper(NativeSaveStrategy(), do_cache_distribution=True)
    state: Any = lambda: {key: part(key, torch.ones(4), replicated=True) for key in "abc"}  # noqa: E731
    first = state()
    wrapper.apply_saving_parallelization(first)
    if at == 0:  # alone: the other rank would have to answer
        again = state()
        wrapper.apply_saving_parallelization(again)
        assert [one.replica_id for one in again.values()] == [one.replica_id for one in first.values()] == [0, 1, 0]
    dist.barrier()
    for number in (1, 2):
        save(state(), folder / f"kept-{number}", wrapper)
    assert load_plain_tensors(folder / "kept-2")["b"].tolist() == [1.0] * 4
    other = {"a": part("a", torch.ones(4), replicated=True), "b": part("b", torch.ones(4), replicated=True)}
    text = refused(lambda: save(other, folder / "kept-3", wrapper))
    assert "do_cache_distribution, its structure must not change" in text, text


@contextmanager
def sent_bytes() -> Any:
    """Count the bytes that this rank gives to ``all_gather`` in a block."""
    sizes, usual = [0], dist.all_gather

    def counting(found: Any, mine: torch.Tensor, **options: Any) -> Any:
        sizes[0] += mine.nbytes
        return usual(found, mine, **options)

    dist.all_gather = counting  # type: ignore[assignment]
    yield sizes
    dist.all_gather = usual


def ranks_send_only_what_changed_since_the_last_save_or_load() -> None:
    at, numbers = dist.get_rank(), iter(range(9))
    names = [f"a-long-name-of-a-tensor-{number}" for number in range(50)]

    def saved(strategy: Any, value: int, *, others: int = 0) -> int:
        state: Any = {key: part(key, torch.full((3,), value + at)) for key in names[others:]}
        state["o"] = ShardedObject("o", 1 << value, (2,), (at,))
        path = folder / f"reused-{next(numbers)}"
        with sent_bytes() as sizes:
            save(state, path, strategy, validate_access_integrity=False)
        stored = load_plain_tensors(path)
        expected = [float(value)] * 3 + [float(value + 1)] * 3
        assert {key: one.tolist() for key, one in stored.items()} == dict.fromkeys(names[others:], expected)
        request = {key: one.without_data() for key, one in state.items()}
        assert cast("Any", load(request, path))["o"] == 1 << value
        return int(sizes[0])

    plain = saved(TorchDistSaveShardedStrategy(), 1)
    keeping: Any = TorchDistSaveShardedStrategy(cached_metadata=True)
    flags: Any = lambda one: (one.validated_cache_reuse, one.validated_loaded_metadata_reuse)  # noqa: E731
    assert saved(keeping, 2) > plain / 2
    assert (flags(keeping), keeping.cached_global_metadata) == ((False, False), None)
    for value in (3, 60):  # the object takes more bytes
        assert saved(keeping, value) < plain / 2
        assert flags(keeping) == (True, False)
        assert (keeping.cached_global_metadata is None) == (at == 1)
    assert saved(keeping, 60) < plain / 10
    assert saved(keeping, 4, others=9) > plain / 2, "another structure is saved too"
    assert flags(keeping) == (False, False)
    if at == 0:
        keeping._last = TorchDistSaveShardedStrategy()._last
    assert saved(keeping, 5, others=9) > plain / 2, "rank 0 asks again for what it does not know"

    loader: Any = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy())
    load({names[0]: part(names[0], torch.zeros(3))}, folder / "reused-0", loader)
    resumed: Any = TorchDistSaveShardedStrategy(cached_metadata=True)
    resumed.cached_global_metadata = loader.cached_global_metadata
    assert len(loader.cached_global_metadata.all_local_plans) == 2
    assert saved(resumed, 1) < plain / 10
    assert flags(resumed) == (False, True)
    assert resumed.cached_global_metadata is loader.cached_global_metadata
    other: Any = TorchDistSaveShardedStrategy(cached_metadata=True)
    other.cached_global_metadata = loader.cached_global_metadata
    assert saved(other, 1, others=1) > plain / 2
    assert flags(other) == (False, False)


def complex_and_real_requests_of_one_part_are_refused_by_both() -> None:
    at, path = dist.get_rank(), folder / "complex"
    save({"c": part("c", torch.tensor([1 + 2j]), replicated=True)}, path)
    request = {"c": part("c", torch.zeros(1, dtype=(torch.complex64, torch.float32)[at]), replicated=True)}
    loader = FullyParallelLoadStrategyWrapper(NativeLoadStrategy())
    text = refused(partial(load, request, path, loader, validate_access_integrity=False))
    assert "some ranks request 'c' as complex numbers, others as real ones" in text, text


def ranks_share_layers_of_a_pipeline() -> None:
    at = dist.get_rank()
    layer: Any = partial(ShardedTensor.from_rank_offsets, "layers", prepend_axis_num=1)
    for form, loader in zip(FORMATS, (NativeLoadStrategy(), TorchDistLoadShardedStrategy()), strict=True):
        path = folder / f"layers-{form[0]}"
        save({"layer": layer(torch.full((2, 3), float(at)), (0, at, 2))}, path, form)
        dtype = torch.bfloat16 if at else torch.float32
        for has_memory in (True, False):
            request = [layer(torch.full((2, 3), 5, dtype=dtype), (0, n, 2), replica_id=(at + n) % 2) for n in (0, 1)]
            wanted: Any = {"list": request if has_memory else [one.without_data() for one in request]}
            wrapped = FullyParallelLoadStrategyWrapper(loader)
            loaded: Any = load(wanted, path, wrapped, validate_access_integrity=False)
            assert [one.tolist() for one in loaded["list"]] == [[[0] * 3] * 2, [[1] * 3] * 2]
            assert {one.dtype for one in loaded["list"]} == {dtype}


def a_damaged_part_of_one_group_is_an_error_of_all() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    at, path = dist.get_rank(), folder / "groups"
    one: Any = lambda n: ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, n, 4), replica_id=at % 2)  # noqa: E731
    save({"w": ShardedTensor.from_rank_offsets("w", torch.ones(4), (0, at, 4))}, path, FORMATS[1])
    if at == 0:
        (path / "__0_0.distcp").write_bytes(b"")
    dist.barrier()
    request = {"first": one(at - at % 2), "second": one(at - at % 2 + 1)}
    loader = FullyParallelLoadStrategyWrapper(TorchDistLoadShardedStrategy(), groups[at // 2])
    assert "__0_0.distcp" in refused(partial(load, request, path, loader))


class FailsToWrite(TorchDistSaveShardedStrategy):
    def async_save(self, *arguments: Any) -> AsyncRequest:
        request = super().async_save(*arguments)

        def write() -> None:
            if dist.get_rank():
                raise OSError("no space left")
            request.write()

        return request._replace(async_fn=write)


def an_error_of_a_background_save_is_known_to_both() -> None:
    queue, later = AsyncCallsQueue(), {"w": part("w", torch.ones(4))}
    request = save(later, folder / "failed", FailsToWrite(), async_sharded_save=True)
    assert request is not None
    queue.schedule_async_request(request)
    for work in (lambda: queue.maybe_finalize_async_calls(blocking=True), request.execute_sync):
        assert "no space left" in refused(work)
    assert not check_is_distributed_checkpoint(folder / "failed")


def ranks_that_finalize_different_requests_are_told_so() -> None:
    for blocking in (True, False):
        queue = AsyncCallsQueue()
        for _ in range(2 - dist.get_rank()):
            queue.schedule_async_request(AsyncRequest(None, (), []))
        if dist.get_rank() == 0:
            assert queue.maybe_finalize_async_calls(no_dist=True, blocking=True) == [0, 1]
            queue.schedule_async_request(AsyncRequest(None, (), []))
        text = refused(partial(queue.maybe_finalize_async_calls, blocking=blocking))
        assert "rank 0 finalizes request 2, but rank 1 request 0" in text, text
        queue.close(abort=True)


def a_save_in_the_background_is_finalized_by_both() -> None:
    for form in FORMATS:
        queue, values = AsyncCallsQueue(), torch.ones(4)
        request = save({"w": part("w", values)}, folder / f"later-{form[0]}", form, async_sharded_save=True)
        assert request is not None
        values.zero_()
        queue.schedule_async_request(request)
        while not queue.maybe_finalize_async_calls():
            pass
        assert load_plain_tensors(folder / f"later-{form[0]}")["w"].tolist() == [1.0] * 8


def a_relay_is_a_place_too() -> None:
    at, place = dist.get_rank(), f"{relay}/v1/jobs/job/checkpoints/"

    def state(value: float) -> dict[str, Any]:
        random = ShardedObject("rng", at if value else None, (2,), (at,))
        copies = part("copies", torch.full((50,), value), replicated=True)
        return {"half": part("half", torch.full((100,), value * at)), "copies": copies, "rng": random}

    def check(name: str, loader: NativeLoadStrategy | FullyParallelLoadStrategyWrapper) -> None:
        loaded: Any = load(state(0.0), place + name, loader, strict="raise_all")
        assert loaded["half"].tolist() == [float(at)] * 100
        assert (loaded["copies"].tolist(), loaded["rng"], loaded["step"]) == ([1.0] * 50, at, 3)

    save({**state(1.0), "step": 3}, place + "plain")
    check("plain", NativeLoadStrategy())
    save({**state(1.0), "step": 3}, place + "shared", FullyParallelSaveStrategyWrapper(NativeSaveStrategy()))
    check("shared", FullyParallelLoadStrategyWrapper(NativeLoadStrategy()))
    request, queue = save({**state(1.0), "step": 3}, place + "later", async_sharded_save=True), AsyncCallsQueue()
    assert request is not None
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    check("later", NativeLoadStrategy())
    assert "plain" in refused(partial(save, state(2.0), place + "plain"))
    check("plain", NativeLoadStrategy())
    needs_files = refused(partial(save, state(1.0), place + "files", FORMATS[1]))
    assert "is not a directory: only keepstep's format can be at a relay" in needs_files, needs_files
    broken = {"o": ShardedObject("o", (lambda: 1) if at else 1, (2,), (at,))}
    assert "o/shard_" in refused(partial(save, broken, place + "again"))
    assert "again" in refused(partial(load_plain_tensors, place + "again"))
    dist.barrier()
    save({**state(1.0), "step": 3}, place + "again")
    check("again", NativeLoadStrategy())


# ---- a model


def train_and_save() -> list[float]:
    job = Job(tp=2, dp=1)
    job.train(2)
    for form in FORMATS:
        save(job.sharded_state(), folder / f"model-{form[0]}", form)
    return job.train(3)


def go_on(tp: int, dp: int, form: str) -> list[float]:
    job = Job(tp, dp)
    job.take(load(job.sharded_state(), folder / f"model-{form}", strict="raise_all"))  # type: ignore[arg-type]
    return job.train(3)


# ---- deaths


def die(*_: object) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


class DiesBeforeItWrites(NativeSaveStrategy):
    def save(self, *_: Any) -> None:
        die()


class DiesBeforeTheLastFile(TorchDistSaveShardedStrategy):
    def save(self, *arguments: Any) -> None:
        super().save(*arguments)
        die()


def one_rank_dies(victim: int, survivor: int, how: str) -> None:
    path = folder / f"killed-{how}"
    with world(0, victim) if survivor == 0 else world(victim, survivor) as is_member:
        if not is_member:
            return
        state, dies = {"w": part("w", torch.ones(4)), "step": 1}, rank == victim
        strategy: Any = {
            "exchange": NativeSaveStrategy,
            "write": DiesBeforeItWrites if dies else NativeSaveStrategy,
            "commit": DiesBeforeTheLastFile if dies else TorchDistSaveShardedStrategy,
        }[how]()
        strategy.timeout = timedelta(seconds=20)
        check = die if dies and how == "exchange" else None
        text = refused(lambda: save(state, path, strategy, preprocess_common_before_consistancy_check=check))
        assert "was not saved: a rank was lost" in text, text
        assert not check_is_distributed_checkpoint(path)


def main() -> None:
    torch.set_num_threads(1)
    expected: list[float] = []
    with world(0, 1) as is_member:
        if is_member:
            every_rank_refuses_what_one_of_them_has_wrong()
            a_damaged_part_of_one_rank_is_an_error_of_both()
            ranks_share_what_they_hold_both()
            ranks_exchange_what_they_read_by_each_algorithm()
            a_kept_assignment_is_used_without_asking_the_other_rank()
            ranks_send_only_what_changed_since_the_last_save_or_load()
            ranks_that_finalize_different_requests_are_told_so()
            complex_and_real_requests_of_one_part_are_refused_by_both()
            ranks_share_layers_of_a_pipeline()
            a_save_in_the_background_is_finalized_by_both()
            an_error_of_a_background_save_is_known_to_both()
            a_relay_is_a_place_too()
            expected = train_and_save()
            for form, _ in FORMATS:
                torch.testing.assert_close(go_on(1, 2, form), expected, rtol=1e-9, atol=0)
    with world(0, 1, 2, 3):
        a_damaged_part_of_one_group_is_an_error_of_all()
        found = go_on(2, 2, FORMATS[0][0])
        if expected:
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    one_rank_dies(victim=3, survivor=0, how="exchange")
    one_rank_dies(victim=2, survivor=0, how="write")
    one_rank_dies(victim=0, survivor=1, how="commit")
    print("ok", flush=True)


main()
