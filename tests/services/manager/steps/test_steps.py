"""A step of the Manager: who takes part, what is averaged, and what makes it commit or not."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp
from torch.futures import Future

from keepstep import Manager, ProcessGroupDummy, WorldSizeMode
from tests.services.manager.groups import manager, together


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
        with pytest.raises(RuntimeError, match=r"2 steps in a row .* max_retries=1; .*1 groups take part"):
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


def test_elements_are_added_by_index_in_any_order_of_memory(lighthouse):
    """Gloo of torch 2.13 alone takes the first bytes of a slice, and adds elements of other indexes."""
    memory = [torch.arange(12.0), torch.arange(12.0)]
    matrices = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3).t().contiguous().t()]
    connected = threading.Barrier(2)

    def group(number: int) -> None:
        with manager(lighthouse, f"r{number}", min_replica_size=2, init_sync=False) as m:
            connected.wait(30)
            m.start_quorum()
            assert m.allreduce(memory[number][::2], reduce_op=ReduceOp.SUM).wait()
            assert m.allreduce(matrices[number], reduce_op=ReduceOp.SUM).wait()
            assert m.should_commit()

    together(lambda: group(0), lambda: group(1))
    for one, matrix in zip(memory, matrices, strict=True):
        assert one.tolist() == [0, 1, 4, 3, 8, 5, 12, 7, 16, 9, 20, 11]
        assert matrix.tolist() == [[0, 2, 4], [6, 8, 10]]


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


def test_a_late_error_does_not_fail_the_next_step(lighthouse):
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


@pytest.mark.parametrize("quantize", [False, True], ids=["plain", "quantized"])
def test_the_group_that_is_gone_in_the_middle_of_a_step_costs_the_other_that_step_only(lighthouse, quantize):
    ready = threading.Barrier(2)

    def reduce(m: Manager) -> bool:
        return m.allreduce(torch.ones(5000), should_quantize=quantize).wait()

    def survivor() -> tuple[Any, ...]:
        with manager(lighthouse, "a", init_sync=False) as m:
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == 2
            ready.wait(30)
            first = (reduce(m), m.should_commit())
            m.start_quorum()
            second = (reduce(m), m.should_commit(), m.num_participants())
            return first, second

    def victim() -> None:
        with manager(lighthouse, "b", init_sync=False) as m:
            ready.wait(30)
            m.start_quorum()
            assert m.num_participants() == 2
            ready.wait(30)
            # leaves in the middle of the step, without a word

    assert together(survivor, victim)[0] == ((False, False), (True, True, 1))


def test_no_retry_at_all_is_a_limit_and_less_than_none_is_refused(lighthouse):
    with manager(lighthouse, "a", max_retries=0) as m:
        m.start_quorum()
        assert m.should_commit()
    with pytest.raises(ValueError, match="max_retries=-1 must be at least 0"), manager(lighthouse, "a", max_retries=-1):
        pass


def test_a_tensor_with_gaps_is_reduced_where_its_elements_are(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> list[list[float]]:
        with manager(lighthouse, name, min_replica_size=2) as m:
            ready.wait(30)
            whole = torch.full((3, 2), -1.0)
            column = whole[:, 0]
            m.start_quorum()
            column.copy_(value * torch.arange(3.0))
            assert m.allreduce(column).wait()
            ready.wait(30)
            assert m.should_commit()
            return whole.tolist()

    expected = [[0.0, -1.0], [3.0, -1.0], [6.0, -1.0]]
    assert together(lambda: group("a", 2.0), lambda: group("b", 4.0)) == [expected, expected]


class LateFailure(ProcessGroupDummy):
    """Its works succeed although it broke, as those of NCCL do."""

    works_report_all_errors = False
    broken: Exception | None = None

    def errored(self) -> Exception | None:
        return self.broken


def test_a_process_group_that_broke_after_its_works_succeeded_commits_nothing(lighthouse):
    pg = LateFailure()
    with manager(lighthouse, "a", pg=pg) as m:
        m.start_quorum()
        assert m.allreduce(torch.ones(1)).wait()
        pg.broken = RuntimeError("a peer is stuck")
        assert not m.should_commit()
        assert m.errored() is pg.broken
        pg.broken = None
        m.start_quorum()
        m.allreduce(torch.ones(1)).wait()
        assert m.should_commit()


def test_a_step_that_is_given_up_counts_as_failed(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        m.allreduce(torch.ones(1)).wait()
        m.start_quorum()
        assert m.should_commit()
        assert m.current_step() == 1


def test_a_rank_that_gives_its_step_up_makes_its_group_vote_no_at_once(lighthouse, unused_tcp_port):
    ready, voted = threading.Barrier(2), threading.Event()

    def rank(number: int) -> tuple[bool, int]:
        place = {"rank": number, "world_size": 2, "store_addr": "127.0.0.1", "store_port": unused_tcp_port}
        with manager(lighthouse, "g", **place) as m:
            m.start_quorum()
            m.wait_quorum()
            ready.wait(30)
            if number == 0:
                m.allreduce(torch.ones(1)).wait()
                m.start_quorum()  # what an exception in a batch leads to
                assert voted.wait(30), "the other rank still waits for our vote"
            else:
                assert not m.should_commit()
                voted.set()
                m.start_quorum()
            return m.should_commit(), m.current_step()

    assert together(lambda: rank(0), lambda: rank(1)) == [(True, 1)] * 2


def test_a_constructor_that_fails_leaves_nothing_running(lighthouse, monkeypatch):
    monkeypatch.setenv("KEEPSTEP_STEP_LOG", "/proc/nowhere/steps.jsonl")
    before = threading.enumerate()
    with pytest.raises(ValueError, match="nowhere"), manager(lighthouse, "a"):
        pass
    assert [thread for thread in threading.enumerate() if thread not in before] == []


def test_before_its_first_step_a_group_takes_part_in_nothing(lighthouse):
    with manager(lighthouse, "a") as m:
        assert (m.num_participants(), m.participating_rank(), m.is_participating()) == (0, None, False)
        m.start_quorum()
        assert (m.num_participants(), m.participating_rank(), m.is_participating()) == (1, 0, True)
        assert m.should_commit()
