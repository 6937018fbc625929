"""The Manager against a real lighthouse and real Gloo groups; each replica group is a thread of this process."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp
from torch.futures import Future

from keepstep import (
    DistributedDataParallel,
    HTTPTransport,
    Manager,
    Optimizer,
    ProcessGroupGloo,
    PureDistributedDataParallel,
    WorldSizeMode,
)
from keepstep.coordination import LighthouseServer
from keepstep_cli.check_history import check_files, violation_lines
from keepstep_mesh.errors import Drained, KeepstepError, LayoutMismatch
from keepstep_mesh.messages import ServiceAddress

SECOND = timedelta(seconds=1)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=1, join_timeout_ms=20_000)
    yield server.address()
    server.shutdown()


@pytest.fixture(autouse=True)
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The step log of all Managers of a test, which has to be a valid history."""
    path = tmp_path / "steps.jsonl"
    monkeypatch.setenv("KEEPSTEP_STEP_LOG", str(path))
    yield path
    if path.exists():
        report = check_files([path])
        assert report.fine, "\n".join(violation_lines(report))


def events(path: Path) -> list[str]:
    return [json.loads(line)["event"] for line in path.read_text().splitlines()]


@contextmanager
def manager(lighthouse: str, name: str, state: dict[str, Any] | None = None, **options: Any) -> Iterator[Manager]:
    held = state if state is not None else {}
    one = Manager(
        ProcessGroupGloo(timeout=20 * SECOND),
        load_state_dict=held.update,
        state_dict=lambda: dict(held),
        lighthouse_addr=lighthouse,
        replica_id=name,
        **{"timeout": 20 * SECOND, "quorum_timeout": 30 * SECOND, **options},
    )
    try:
        yield one
    finally:
        one.shutdown()


def together(*groups: Callable[[], Any]) -> list[Any]:
    """Runs each group in a thread; all results, or the first error."""
    with concurrent.futures.ThreadPoolExecutor(len(groups)) as pool:
        return [one.result(60) for one in [pool.submit(group) for group in groups]]


def test_two_groups_average_and_commit(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> tuple[Any, ...]:
        with manager(lighthouse, name, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            tensor = torch.full((3,), value)
            assert m.allreduce(tensor).wait()
            ready.wait(30)
            return m.num_participants(), tensor.tolist(), m.should_commit(), m.current_step(), m.batches_committed()

    assert together(lambda: group("a", 2.0), lambda: group("b", 4.0)) == [(2, [3.0] * 3, True, 1, 2)] * 2


def test_at_the_first_step_all_groups_take_over_one_state_and_all_contribute(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> tuple[Any, ...]:
        state = {"weights": torch.full((4,), value)}
        with manager(lighthouse, name, state, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            before_forward = state["weights"].tolist()
            tensor = torch.full((1,), value)
            m.allreduce(tensor).wait()
            ready.wait(30)
            return before_forward, tensor.item(), m.should_commit(), m.state_dict()

    a, b = together(lambda: group("a", 1.0), lambda: group("b", 5.0))
    assert a == b
    assert a[0] in ([1.0] * 4, [5.0] * 4)
    assert (a[1], a[2]) == (3.0, True)
    assert a[3]["lineage"] >= 1


def test_without_init_sync_each_group_keeps_its_own_first_state(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> tuple[Any, ...]:
        state = {"weights": torch.full((1,), value)}
        with manager(lighthouse, name, state, init_sync=False, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            ready.wait(30)
            return m.should_commit(), state["weights"].item()

    assert together(lambda: group("a", 1.0), lambda: group("b", 5.0)) == [(True, 1.0), (True, 5.0)]


@pytest.mark.parametrize("sync", [False, True])
def test_a_late_group_heals_to_the_step_and_state_of_the_others(lighthouse, sync):
    three_done, joined, end = threading.Event(), threading.Event(), threading.Barrier(2)

    def veteran() -> tuple[Any, ...]:
        state = {"weights": torch.full((2,), 7.0)}
        with manager(lighthouse, "a", state, use_async_quorum=not sync) as m:
            for _ in range(3):
                m.start_quorum()
                assert m.should_commit()
            three_done.set()
            assert joined.wait(30)
            while m.current_step() < 200:
                m.start_quorum()
                gradient = torch.ones(1)
                m.allreduce(gradient).wait()
                committed, met = m.should_commit(), gradient.item()
                if committed and m.batches_committed() > m.current_step():
                    end.wait(30)
                    return m.current_step(), m.batches_committed(), met
            raise AssertionError("the joiner never took part")

    def joiner() -> tuple[Any, ...]:
        assert three_done.wait(30)
        state = {"weights": torch.zeros(2)}
        own = state["weights"]
        with manager(lighthouse, "b", state, use_async_quorum=not sync) as m:
            joined.set()
            while not (m.current_step() and m.batches_committed() > m.current_step()):
                m.start_quorum()
                gradient = torch.ones(1)
                m.allreduce(gradient).wait()
                m.should_commit()
            end.wait(30)
            return m.current_step(), m.batches_committed(), own.tolist()

    a, b = together(veteran, joiner)
    assert a[:2] == b[:2]
    assert b[2] == [7.0, 7.0], "received into the tensors that were there"


def test_a_reported_error_rejects_the_step_and_the_next_one_works(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        m.report_error(RuntimeError("bad batch"))
        tensor = torch.ones(1)
        assert not m.allreduce(tensor).wait()
        assert m.allreduce(tensor).get_future().value() is tensor
        assert isinstance(m.errored(), RuntimeError)
        assert not m.should_commit()
        assert (m.current_step(), m.batches_committed()) == (0, 0)
        m.start_quorum()
        assert m.errored() is None
        assert m.allreduce(tensor).wait()
        assert m.should_commit()
        assert m.current_step() == 1


def test_too_few_groups_never_commit_and_max_retries_ends_it(lighthouse):
    with manager(lighthouse, "a", min_replica_size=2, max_retries=1) as m:
        m.start_quorum()
        assert not m.should_commit()
        m.start_quorum()
        with pytest.raises(RuntimeError, match=r"2 steps in a row failed \(max_retries=1\).*1 groups take part"):
            m.should_commit()


def test_an_average_of_integers_is_refused_and_a_sum_is_not(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        with pytest.raises(ValueError, match=r"average of torch.int64 would lose its fraction"):
            m.allreduce(torch.ones(1, dtype=torch.int64))
        tensor = torch.full((1,), 3)
        assert m.allreduce(tensor, reduce_op=ReduceOp.SUM).wait()
        assert tensor.item() == 3
        assert m.should_commit()


def test_quantization_is_refused_rather_than_silently_left_out(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        with pytest.raises(ValueError, match="no quantized all-reduce"):
            m.allreduce(torch.ones(1), should_quantize=True)
        assert m.should_commit()


def test_a_wrapped_future_that_fails_or_is_late_gives_the_default_and_rejects_the_step(lighthouse):
    with manager(lighthouse, "a") as m:
        for settle in (lambda f: f.set_exception(RuntimeError("lost")), lambda _: None):
            m.start_quorum()
            future: Future[int] = Future()
            wrapped = m.wrap_future(future, 7, timedelta(milliseconds=50))
            settle(future)
            assert wrapped.wait() == 7
            assert m.errored() is not None
            assert not m.should_commit()


def test_a_spare_contributes_zeros_and_takes_the_result(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str) -> tuple[Any, ...]:
        options = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 1}
        with manager(lighthouse, name, **options) as m:
            # both are there before either asks, so that one quorum takes both
            ready.wait(30)
            m.start_quorum()
            tensor = torch.full((1,), 6.0)
            m.allreduce(tensor).wait()
            ready.wait(30)
            return m.is_participating(), m.num_participants(), tensor.item(), m.should_commit()

    assert sorted(together(lambda: group("a"), lambda: group("b"))) == [(False, 1, 6.0, True), (True, 1, 6.0, True)]


def test_a_step_without_start_quorum_says_what_to_call(lighthouse):
    with manager(lighthouse, "a") as m, pytest.raises(RuntimeError, match=r"call start_quorum\(\) first"):
        m.should_commit()


def test_a_state_key_is_registered_once(lighthouse):
    with manager(lighthouse, "a") as m:
        m.register_state_dict_fn("ema", lambda _: None, dict)
        with pytest.raises(ValueError, match="registered as 'ema' already"):
            m.register_state_dict_fn("ema", lambda _: None, dict)
        m.set_state_dict_fns(lambda _: None, dict)


def test_state_dict_goes_around_and_takes_what_torchft_wrote(lighthouse, steps):
    with manager(lighthouse, "a") as m:
        assert m.state_dict() == {"step": 0, "batches_committed": 0}
        m.load_state_dict({"step": 9, "batches_committed": 20})
        assert (m.current_step(), m.batches_committed()) == (9, 20)
        m.start_quorum()
        assert m.should_commit()
        saved = m.state_dict()
        assert saved["step"] == 10
        assert saved["lineage"] >= 1
        m.load_state_dict(saved)
        assert m.state_dict() == saved
    assert events(steps) == ["started", "loaded", "quorum", "committed", "loaded"]


def test_no_lighthouse_is_a_timeout_that_names_it(monkeypatch):
    monkeypatch.setenv("KEEPSTEP_CONNECT_TIMEOUT_SEC", "0.4")
    with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:9"):
        Manager(ProcessGroupGloo(), lighthouse_addr="http://127.0.0.1:9", replica_id="a")


def test_without_any_address_the_error_says_what_to_set(monkeypatch):
    for name in ("KEEPSTEP_LIGHTHOUSE", "TORCHFT_LIGHTHOUSE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match="set KEEPSTEP_LIGHTHOUSE="):
        Manager(ProcessGroupGloo())


@pytest.mark.parametrize("prefix", ["KEEPSTEP", "TORCHFT"])
def test_the_quorum_timeout_of_the_environment_is_the_one_in_force(monkeypatch, prefix):
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    monkeypatch.setenv(f"{prefix}_QUORUM_TIMEOUT_SEC", "0.3")
    monkeypatch.setenv(f"{prefix}_LIGHTHOUSE", server.address())
    try:
        m = Manager(ProcessGroupGloo(), lambda _: None, dict, replica_id="a", use_async_quorum=False)
        try:
            with pytest.raises(TimeoutError, match="1 of at least 2 groups"):
                m.start_quorum()
            with pytest.raises(TimeoutError):  # still usable: it asks again
                m.start_quorum()
        finally:
            m.shutdown()
    finally:
        server.shutdown()


def test_a_bad_duration_in_the_environment_is_named(monkeypatch, lighthouse):
    monkeypatch.setenv("KEEPSTEP_TIMEOUT_SEC", "soon")
    with pytest.raises(ValueError, match=r"KEEPSTEP_TIMEOUT_SEC='soon' must be a positive number of seconds"):
        Manager(ProcessGroupGloo(), lighthouse_addr=lighthouse)


def test_an_asynchronous_quorum_that_fails_rejects_the_step_only(monkeypatch):
    server = LighthouseServer("127.0.0.1:0", min_replicas=2)
    try:
        with manager(server.address(), "a", quorum_timeout=timedelta(milliseconds=300), init_sync=False) as m:
            m.start_quorum()
            assert not m.allreduce(torch.ones(1)).wait()
            assert not m.should_commit()
            ready = threading.Barrier(2)

            def second() -> bool:
                with manager(server.address(), "b", init_sync=False) as other:
                    ready.wait(30)
                    other.start_quorum()
                    committed = other.should_commit()
                    ready.wait(30)
                    return committed

            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                theirs = pool.submit(second)
                ready.wait(30)
                m.start_quorum(timeout=20 * SECOND)
                assert m.should_commit()
                ready.wait(30)
                assert theirs.result(30)
    finally:
        server.shutdown()


def test_a_wish_to_leave_ends_at_the_next_step_with_exit_code_0(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        assert m.should_commit()
        m._wish_to_leave("SIGTERM")
        with pytest.raises(Drained) as left:
            m.start_quorum()
        assert left.value.code == 0


def test_a_model_that_does_not_fit_the_job_is_refused_with_the_first_difference(lighthouse):
    ready, done = threading.Barrier(2), threading.Event()

    def veteran() -> None:
        with manager(lighthouse, "a") as m:
            DistributedDataParallel(m, nn.Linear(4, 2))
            m.start_quorum()
            assert m.should_commit()
            ready.wait(30)
            done.wait(30)

    def stranger() -> str:
        ready.wait(30)
        with manager(lighthouse, "b") as m:
            DistributedDataParallel(m, nn.Linear(5, 2))
            try:
                with pytest.raises(LayoutMismatch) as refused:
                    m.start_quorum()
                return str(refused.value)
            finally:
                done.set()

    _, message = together(veteran, stranger)
    assert "here 'weight (2, 5) torch.float32 cpu'" in message
    assert "'weight (2, 4) torch.float32 cpu'" in message


@pytest.mark.parametrize("pure", [False, True])
def test_gradients_are_averaged_over_the_groups(lighthouse, pure):
    ready = threading.Barrier(2)

    def group(name: str, scale: float) -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1, bias=False)
        state_fns = {"min_replica_size": 2, "init_sync": False}
        with manager(lighthouse, name, **state_fns) as m:
            wrapped = PureDistributedDataParallel(m, model) if pure else DistributedDataParallel(m, model)
            optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=0.0))
            ready.wait(30)
            optimizer.zero_grad()
            wrapped(torch.full((1, 3), scale)).sum().backward()
            committed = optimizer.step()
            ready.wait(30)
            return committed, model.weight.grad.tolist()

    assert together(lambda: group("a", 1.0), lambda: group("b", 3.0)) == [(True, [[2.0] * 3])] * 2


def test_an_unused_parameter_counts_with_a_gradient_of_zero_in_every_group(lighthouse):
    ready = threading.Barrier(2)

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def forward(self, x: torch.Tensor, right: bool) -> torch.Tensor:
            return self.right(x) if right else self.left(x)

    def group(name: str, right: bool) -> list[float]:
        model = Branches()
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = DistributedDataParallel(m, model)
            ready.wait(30)
            m.start_quorum()
            ddp(torch.full((1, 1), 4.0), right).sum().backward()
            assert m.should_commit()
            ready.wait(30)
            return [p.grad.item() for p in model.parameters()]

    assert together(lambda: group("a", False), lambda: group("b", True)) == [[2.0, 2.0]] * 2


def test_no_sync_accumulates_and_the_last_pass_averages_all(lighthouse):
    model = nn.Linear(1, 1, bias=False)
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, model)
        m.start_quorum()
        with ddp.no_sync():
            ddp(torch.ones(1, 1)).sum().backward()
        ddp(torch.ones(1, 1)).sum().backward()
        assert m.should_commit()
        assert model.weight.grad.item() == 2.0


def test_an_optimizer_step_says_whether_it_stepped(lighthouse):
    model = nn.Linear(1, 1, bias=False)
    with manager(lighthouse, "a", min_replica_size=1) as m:
        optimizer = Optimizer(m, torch.optim.SGD(model.parameters(), lr=1.0))
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        m.report_error(RuntimeError("no"))
        assert optimizer.step() is False
        assert model.weight.item() == before
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        assert optimizer.step() is True
        assert model.weight.item() == before - 1.0
        with pytest.raises(ValueError, match="closure"):
            optimizer.step(lambda: 0.0)


def test_while_the_state_may_not_be_read_no_healing_group_gets_it(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str) -> bool:
        with manager(lighthouse, name, {"w": torch.ones(1)}, min_replica_size=2, timeout=2 * SECOND) as m:
            m.disallow_state_dict_read()
            ready.wait(30)
            m.start_quorum()
            ready.wait(30)
            return m.should_commit()

    assert together(lambda: group("a"), lambda: group("b")) == [True, False]


def test_unreachable_once_the_lighthouse_is_back_the_same_manager_goes_on():
    server = LighthouseServer("127.0.0.1:0", min_replicas=1)
    address = server.address()
    with manager(address, "a", quorum_timeout=timedelta(milliseconds=400), init_sync=False) as m:
        m.start_quorum()
        assert m.should_commit()
        server.shutdown()
        m.start_quorum()
        assert not m.should_commit()
        server = LighthouseServer(address.removeprefix("http://"), min_replicas=1)
        try:
            m.start_quorum(timeout=20 * SECOND)
            assert m.should_commit()
            assert m.current_step() == 2
        finally:
            m.shutdown()
            server.shutdown()


def test_shutdown_in_the_middle_of_a_step_frees_everything_and_twice_is_fine(lighthouse):
    m = Manager(ProcessGroupGloo(), lambda _: None, dict, lighthouse_addr=lighthouse, replica_id="a")
    m.start_quorum()
    m.num_participants()
    m.shutdown()
    m.shutdown()
    with pytest.raises((RuntimeError, KeepstepError)):
        m.start_quorum()


def test_the_state_is_read_and_loaded_on_the_training_thread_only(lighthouse):
    ready = threading.Barrier(2)
    threads: dict[str, set[str]] = {"a": set(), "b": set()}

    def group(name: str) -> tuple[Any, ...]:
        weights = torch.ones(1)

        def save() -> dict[str, torch.Tensor]:
            threads[name].add(threading.current_thread().name)
            return {"w": weights}

        def load(_: object) -> None:
            threads[name].add(threading.current_thread().name)

        with manager(lighthouse, name, min_replica_size=2) as m:
            m.set_state_dict_fns(load, save)
            ready.wait(30)
            m.start_quorum()
            ready.wait(30)
            return m.should_commit(), threading.current_thread().name

    results = together(lambda: group("a"), lambda: group("b"))
    assert [committed for committed, _ in results] == [True, True]
    assert threads["a"] | threads["b"] == {thread for _, thread in results}


class SlowTransport(HTTPTransport[dict[str, Any]]):
    """Receives only when it is let."""

    may_go_on = threading.Event()

    def recv_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        assert self.may_go_on.wait(60)
        return super().recv_checkpoint(*args, **options)


def test_a_joiner_contributes_zeros_at_once_and_its_heal_holds_up_no_all_reduce(lighthouse):
    ahead, joined, healed = threading.Event(), threading.Event(), threading.Event()
    SlowTransport.may_go_on.clear()

    def veteran() -> tuple[Any, ...]:
        with manager(lighthouse, "a") as m:
            for _ in range(2):
                m.start_quorum()
                assert m.should_commit()
            ahead.set()
            assert joined.wait(30)
            m.start_quorum()
            tensor = torch.full((1,), 8.0)
            members = 0
            while not members:  # the quorum that takes the joiner in may be the next one
                worked = m.allreduce(tensor).wait()
                members = m._current().plan.replica_world_size - 1
                if not members:
                    assert m.should_commit()
                    m.start_quorum()
            committed = m.should_commit()
            SlowTransport.may_go_on.set()
            assert healed.wait(30)
            return worked, tensor.item(), m.num_participants(), committed

    def joiner() -> tuple[Any, ...]:
        assert ahead.wait(30)
        transport = SlowTransport(timeout=30 * SECOND, num_chunks=0, hostname="127.0.0.1")
        with manager(lighthouse, "b", checkpoint_transport=transport) as m:
            joined.set()
            m.start_quorum(timeout=30 * SECOND)
            tensor = torch.full((1,), 99.0)
            worked = m.allreduce(tensor).wait()
            committed = m.should_commit()
            healed.set()
            return worked, tensor.item(), m.is_participating(), committed

    a, b = together(veteran, joiner)
    assert a == (True, 8.0, 1, True)
    assert b == (True, 8.0, False, True)


def test_the_group_that_is_gone_in_the_middle_of_a_step_costs_the_other_that_step_only(lighthouse):
    ready = threading.Barrier(2)

    def survivor() -> tuple[Any, ...]:
        with manager(lighthouse, "a", init_sync=False) as m:
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == 2
            ready.wait(30)
            first = (m.allreduce(torch.ones(1)).wait(), m.should_commit())
            m.start_quorum()
            second = (m.allreduce(torch.ones(1)).wait(), m.should_commit(), m.num_participants())
            return first, second

    def victim() -> None:
        with manager(lighthouse, "b", init_sync=False) as m:
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == 2
            ready.wait(30)
            # leaves in the middle of the step, without a word

    assert together(survivor, victim)[0] == ((False, False), (True, True, 1))


OVERRIDES = {
    "TIMEOUT_SEC": ("1.5", "_timeout"),
    "QUORUM_TIMEOUT_SEC": ("2.5", "_quorum_timeout"),
    "CONNECT_TIMEOUT_SEC": ("3.5", "_connect_timeout"),
}


@pytest.mark.parametrize("prefix", ["KEEPSTEP", "TORCHFT"])
def test_every_override_of_the_environment_reaches_where_the_value_is_used(lighthouse, monkeypatch, prefix):
    for name, (value, _) in OVERRIDES.items():
        monkeypatch.setenv(f"{prefix}_{name}", value)
    monkeypatch.setenv(f"{prefix}_QUORUM_RETRIES", "4")
    with manager(lighthouse, "a") as m:
        assert {name: getattr(m, where) for name, (_, where) in OVERRIDES.items()} == {
            name: timedelta(seconds=float(value)) for name, (value, _) in OVERRIDES.items()
        }
        assert (m._settings.connect_timeout, m._settings.quorum_retries) == (3.5, 4)
        assert m._reconfigurer._timeout == timedelta(seconds=1.5)
        assert m._transport._server._timeout == 1.5
        m.start_quorum()
        assert m._attempt is not None
        assert m._attempt.timeout == 2.5
        assert m.should_commit()


def test_a_group_that_took_part_although_behind_is_still_behind(lighthouse, steps):
    ready = threading.Barrier(2)

    def group(name: str, lineage: int) -> tuple[Any, ...]:
        weights = {"w": torch.full((1,), float(lineage))}
        with manager(lighthouse, name, weights) as m:
            m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": lineage})
            ready.wait(30)
            m.start_quorum(allow_heal=False)
            m.allreduce(torch.zeros(1)).wait()
            first = m.should_commit()
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            second = m.should_commit()
            ready.wait(30)
            return first, second, weights["w"].item()

    assert together(lambda: group("a", 1), lambda: group("b", 2)) == [(True, True, 2.0)] * 2
    (behind,) = [line for line in map(json.loads, steps.read_text().splitlines()) if line.get("behind")]
    assert (behind["replica_id"].partition(":")[0], behind["step"], behind["lineage"]) == ("a", 6, 1)


def test_a_load_that_fails_leaves_no_state_that_others_could_heal_from(lighthouse):
    ready, done = threading.Barrier(2), threading.Event()

    def source() -> None:
        with manager(lighthouse, "a", {"w": torch.ones(1)}, min_replica_size=2) as m:
            m.load_state_dict({"step": 5, "batches_committed": 5, "lineage": 3})
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            m.should_commit()
            assert done.wait(30)

    def joiner() -> tuple[Any, ...]:
        def load(_: object) -> None:
            raise ValueError("does not fit")

        with manager(lighthouse, "b", min_replica_size=2) as m:
            m.set_state_dict_fns(load, lambda: {"w": torch.zeros(1)})
            m.load_state_dict({"step": 4, "batches_committed": 4, "lineage": 2})
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.zeros(1)).wait()
            committed = m.should_commit()
            done.set()
            return committed, m.current_step(), str(m._standing.lineage).startswith("torn:"), str(m.errored())

    assert together(source, joiner)[1] == (False, 0, True, "does not fit")


def test_groups_that_registered_different_states_do_not_heal_from_each_other(lighthouse):
    ready, done = threading.Barrier(2), threading.Barrier(2)

    def group(name: str) -> str:
        with manager(lighthouse, name, min_replica_size=2) as m:
            if name == "b":
                m.register_state_dict_fn("ema", lambda _: None, dict)
            ready.wait(30)
            m.start_quorum()
            m.should_commit()
            done.wait(30)
            return str(m.errored())

    assert "register the same keys" in together(lambda: group("a"), lambda: group("b"))[1]


def test_an_optimizer_that_breaks_after_the_commit_makes_the_group_heal(lighthouse, steps):
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # noqa: ARG002
            raise ValueError("no memory")

    model = nn.Linear(1, 1)
    with manager(lighthouse, "a") as m:
        optimizer = Optimizer(m, Breaks(model.parameters(), lr=1.0))
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(ValueError, match="no memory"):
            optimizer.step()
        with pytest.raises(KeepstepError, match="no healthy group is there to heal from"):
            optimizer.zero_grad()
    assert events(steps)[:4] == ["started", "quorum", "committed", "torn"]


def test_batch_norm_with_several_buckets_trains_and_stays_equal(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, seed: int) -> list[float]:
        torch.manual_seed(seed)
        layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.BatchNorm1d(64))]
        model = nn.Sequential(*layers)
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)

        def load(state: dict[str, Any]) -> None:
            model.load_state_dict(state)

        with manager(lighthouse, name, min_replica_size=2) as m:
            m.set_state_dict_fns(load, model.state_dict)
            ddp = DistributedDataParallel(m, model, bucket_cap_mb=0.02)
            optimizer = Optimizer(m, sgd)
            ready.wait(30)
            for _ in range(5):
                optimizer.zero_grad()
                ddp(torch.randn(8, 64)).square().sum().backward()
                assert optimizer.step(), m.errored()
            ready.wait(30)
            return [tensor.double().sum().item() for tensor in model.state_dict().values()]

    a, b = together(lambda: group("a", 1), lambda: group("b", 2))
    assert a == b


def test_groups_that_take_different_branches_never_average_one_parameter_with_another(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, branch: int) -> list[float]:
        model = nn.ModuleList([nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)])
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            PureDistributedDataParallel(m, model)
            ready.wait(30)
            m.start_quorum()
            model[branch](torch.full((1, 1), 4.0)).sum().backward()
            assert m.should_commit()
            ready.wait(30)
            return [p.grad.item() for p in model.parameters()]

    assert together(lambda: group("a", 0), lambda: group("b", 1)) == [[2.0, 2.0]] * 2


def test_what_goes_wrong_late_is_not_held_against_the_next_step(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        late: Future[int] = Future()
        wrapped = m.wrap_future(late, 0, timedelta(seconds=20))
        assert m.should_commit()
        m.start_quorum()
        late.set_exception(RuntimeError("too late"))
        assert wrapped.wait() == 0
        assert m.errored() is None
        assert m.should_commit()


def test_the_manager_knows_the_services_that_registered(lighthouse):
    body = json.dumps({"address": "http://10.0.0.7:29520"}).encode()
    request = urllib.request.Request(f"{lighthouse}/v1/services/relay/relay-1", body, method="PUT")
    with urllib.request.urlopen(request, timeout=20):
        pass
    with manager(lighthouse, "a") as m:
        assert m.services == (ServiceAddress("relay", "relay-1", "http://10.0.0.7:29520"),)
