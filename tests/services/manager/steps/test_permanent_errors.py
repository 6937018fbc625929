"""The same error of a script in three steps in a row ends the group with its traceback, instead of discarding steps."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import ReduceOp

from keepstep import DistributedDataParallel, Manager
from keepstep.coordination import LighthouseServer
from keepstep.step.evidence.repeated_error import LIMIT
from tests.services.manager.groups import events, manager
from tests.services.manager.steps.test_retried_steps import Lossy

Act = Callable[[Manager], object]


def fails_in_write_back(m: Manager) -> None:
    def write_back() -> None:
        raise ValueError("the buffer is gone")

    m.allreduce(torch.ones(1), write_back=write_back)


def fails_to_start(m: Manager) -> None:
    m.allreduce(torch.eye(3).to_sparse())  # it must be dense


def fails_in_gloo(m: Manager) -> None:
    m.allreduce(torch.ones(3), reduce_op=ReduceOp.BAND)


def has_no_such_dtype(m: Manager) -> None:
    m.allreduce(torch.ones(3, dtype=torch.uint16), reduce_op=ReduceOp.BOR)


def codec_fails(m: Manager) -> None:
    def start(_: object) -> Any:
        raise TypeError("a codec with a mistake")

    m.run_collective([torch.ones(1)], start)


def reports(m: Manager) -> None:
    m.report_error(ValueError("a bad batch"))


numbers = itertools.count()


def reports_a_loss(m: Manager) -> None:
    m.report_error(ValueError(f"the loss is {next(numbers) * 0.5} of {object()}"))


def raises_with_a_number(m: Manager) -> None:
    def write_back() -> None:
        raise ValueError(f"no batch {next(numbers)}")

    m.allreduce(torch.ones(1), write_back=write_back)


@pytest.mark.parametrize(
    "act",
    [
        fails_in_write_back,
        fails_to_start,
        fails_in_gloo,
        has_no_such_dtype,
        codec_fails,
        reports,
        reports_a_loss,
        raises_with_a_number,
    ],
)
def test_the_same_error_of_the_script_ends_the_group(lighthouse, act: Act):
    with manager(lighthouse, "a") as m:
        for _ in range(LIMIT - 1):
            m.start_quorum()
            act(m)
            assert not m.should_commit()
        m.start_quorum()
        act(m)
        with pytest.raises(RuntimeError, match=f"{LIMIT} steps in a row failed with the same error") as ended:
            m.should_commit()
        assert ended.value.__cause__ is m.errored()
        with pytest.raises(RuntimeError, match="in a row failed"):
            m.start_quorum()


def test_a_script_that_never_commits_ends(lighthouse):
    """A plain optimizer that keepstep does not know."""
    model = nn.Linear(2, 1)
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, model)
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(RuntimeError, match=r"instead of ending this one with should_commit\(\)"):
            for _ in range(LIMIT + 1):
                m.start_quorum()
                ddp(torch.ones(1, 2)).sum().backward()
                plain.step()
        assert m.current_step() == 0


def test_a_step_that_commits_in_between_counts_from_the_beginning(lighthouse):
    with manager(lighthouse, "a") as m:
        for _ in range(2):
            for acts in (True, True, False):
                m.start_quorum()
                if acts:
                    reports(m)
                assert m.should_commit() is not acts


def test_errors_of_other_groups_never_end_it(lighthouse, steps):
    with manager(lighthouse, "a", pg=Lossy(2 * LIMIT)) as m:
        m.start_quorum()
        while not (m.allreduce(torch.ones(1)), m.should_commit())[1]:
            m.start_quorum()
    assert events(steps).count("discarded") == 2 * LIMIT


def test_quorums_that_do_not_form_never_end_it(steps):
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=60_000)
    options: dict[str, Any] = {"init_sync": False, "quorum_timeout": timedelta(seconds=0.1)}
    with manager(server.address(), "a", **options) as m:
        for _ in range(2 * LIMIT):
            m.start_quorum()
            m.allreduce(torch.ones(1))
            assert not m.should_commit()
    server.shutdown()
    assert events(steps).count("discarded") == 2 * LIMIT


def test_steps_with_too_few_groups_never_end_it(lighthouse, steps):
    with manager(lighthouse, "a", min_replica_size=2, init_sync=False) as m:
        for _ in range(2 * LIMIT):
            m.start_quorum()
            m.allreduce(torch.ones(1))
            assert not m.should_commit()
    assert events(steps).count("discarded") == 2 * LIMIT


SCRIPT = """
import sys, torch
from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

model = torch.nn.BatchNorm1d(2)
manager = Manager(ProcessGroupGloo(), model.load_state_dict, model.state_dict, lighthouse_addr=sys.argv[1])
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0))
def gone(): raise ValueError(f"the buffer {object()} is gone")
while manager.current_step() < 5:
    optimizer.zero_grad()
    ddp(torch.randn(4, 2)).sum().backward()
    manager.allreduce(torch.ones(1), write_back=gone)
    optimizer.step()
"""


@pytest.mark.timeout(120)
def test_a_script_ends_with_code_1_and_the_traceback_of_its_error(lighthouse):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, lighthouse], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 1
    assert "in gone\n" in done.stderr
    assert done.stderr.index("ValueError: the buffer <object") < done.stderr.index("steps in a row failed")
