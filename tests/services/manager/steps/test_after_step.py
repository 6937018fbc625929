"""Reductions of a script between ``should_commit`` and the next ``start_quorum``, such as a loss for its log."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.distributed import ReduceOp

from tests.services.manager.groups import SECOND, manager, together


def test_after_a_step_its_groups_reduce_values_and_the_step_stays(lighthouse) -> None:
    ready = threading.Barrier(2)

    def group(name: str, loss: float) -> list[object]:
        with manager(lighthouse, name, {"w": torch.zeros(1)}, min_replica_size=2) as m:
            with pytest.raises(RuntimeError, match="no step has begun"):
                m.allreduce(torch.ones(1))
            ready.wait(30)
            seen: list[object] = []
            for _ in range(2):
                m.start_quorum()
                m.allreduce(torch.ones(1))
                seen.append(m.should_commit())
                for op in (ReduceOp.AVG, ReduceOp.MAX):
                    value = torch.tensor(loss)
                    assert m.allreduce(value, reduce_op=op).wait()
                    seen.append(value.item())
                m.allreduce(torch.ones(1))  # only the next step waits for it
            seen += [m.current_step(), m.errored()]
            ready.wait(30)
            return seen

    assert together(lambda: group("a", 1.0), lambda: group("b", 3.0)) == [[True, 2.0, 3.0] * 2 + [2, None]] * 2


def test_a_group_that_committed_does_not_wait_for_one_that_discarded(lighthouse) -> None:
    """``b`` fails after its collectives have ended, so ``a`` commits. ``b`` reduces nothing, and asks for a quorum."""
    reduced, reported, left = threading.Barrier(2), threading.Event(), threading.Barrier(2)

    def a() -> list[object]:
        with manager(lighthouse, "a", {"w": torch.zeros(1)}, timeout=60 * SECOND) as m:
            reduced.wait(30)
            m.start_quorum()
            assert m.allreduce(torch.ones(1)).wait()
            reduced.wait(30)
            seen = [m.should_commit()]
            reported.set()
            loss = m.allreduce(torch.ones(1))
            seen += [loss.wait(), m.allreduce(torch.ones(1)).wait(), m.errored() is not None, m.current_step()]
            m.start_quorum()
            assert m.errored() is None
            m.allreduce(torch.ones(1))
            seen += [m.should_commit(), m.num_participants()]
            left.wait(30)
            return seen

    def b() -> list[object]:
        with manager(lighthouse, "b", {"w": torch.ones(1)}) as m:
            reduced.wait(30)
            m.start_quorum()
            assert m.allreduce(torch.ones(1)).wait()
            reduced.wait(30)
            reported.wait(30)
            m.steps.attempt._first_error.vote_no(
                RuntimeError("this group alone")
            )  # without an abort, as another rank's no
            seen = [m.should_commit(), m.allreduce(torch.ones(1)).wait(), m.current_step()]
            m.start_quorum()
            m.allreduce(torch.ones(1))
            seen += [m.should_commit(), m.current_step()]
            left.wait(30)
            return seen

    seen_a, seen_b = together(a, b)
    assert seen_a == [True, False, False, True, 1, True, 1]
    assert seen_b == [False, False, 0, True, 2]
