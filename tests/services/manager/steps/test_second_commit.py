"""``should_commit`` without a ``start_quorum`` since the last one: a step of its own, as in scripts for torchft."""

from __future__ import annotations

import threading

import pytest
import torch

from keepstep import Optimizer
from tests.services.manager.groups import manager, together


def test_a_second_should_commit_counts_a_step_of_its_own_in_all_groups(lighthouse) -> None:
    ready = threading.Barrier(2)

    def group(name: str) -> list[object]:
        with manager(lighthouse, name, {"w": torch.zeros(1)}, min_replica_size=2, use_async_quorum=False) as m:
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.ones(1)).wait()
            seen: list[object] = [m.should_commit(), m.current_step(), m.should_commit(), m.current_step()]
            m.start_quorum()
            total = torch.ones(1)
            m.allreduce(total).wait()
            seen += [m.should_commit(), m.current_step(), m.batches_committed(), total.item()]
            ready.wait(30)
            return seen

    assert together(lambda: group("a"), lambda: group("b")) == [[True, 1, True, 2, True, 3, 6, 1.0]] * 2


def test_after_a_discarded_step_a_second_should_commit_is_false_too(lighthouse) -> None:
    with manager(lighthouse, "a", {"w": torch.zeros(1)}) as m:
        m.start_quorum()
        m.report_error(RuntimeError("of the script"))
        assert not m.should_commit()
        assert not m.should_commit()
        assert "called again after a step that was discarded" in str(m.errored())
        m.start_quorum()
        assert m.should_commit()
        assert m.current_step() == 1


def test_a_second_step_of_an_optimizer_is_refused(lighthouse) -> None:
    """It would change the weights a second time with the same gradients."""
    model = torch.nn.Linear(2, 2)
    with manager(lighthouse, "a", {"w": torch.zeros(1)}) as m:
        optimizer = Optimizer(m, torch.optim.SGD(model.parameters()))
        optimizer.zero_grad()
        assert optimizer.step()
        with pytest.raises(RuntimeError, match="no step has begun"):
            optimizer.step()
