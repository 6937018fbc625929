"""The first step of many groups that heal from one source over a narrow uplink, without a relay."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from keepstep.checkpointing import HTTPTransport, TransferError
from keepstep.coordination import LighthouseServer
from keepstep_mesh.errors import Drained
from tests.services.manager.groups import SECOND, Flaky, change_policy, manager, together
from tests.services.manager.limited_uplink import LimitedUplink

GROUPS = 6
BYTES = 1_000_000
RATE = 1_000_000.0
"""Five copies take 5 s over one uplink, and one after the other 1 s each."""
TIMEOUT = 2.5 * SECOND
STEPS_AT_MOST = 4


@pytest.fixture
def all_at_once() -> Iterator[str]:
    """A lighthouse whose first quorum has all groups."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=GROUPS, join_timeout_ms=20_000)
    yield server.address()
    server.shutdown()


def test_a_first_step_commits_though_all_copies_together_take_longer_than_the_timeout(all_at_once: str) -> None:
    ready, end = threading.Barrier(GROUPS), threading.Barrier(GROUPS)
    transports = [LimitedUplink(TIMEOUT, RATE) for _ in range(GROUPS)]

    def group(number: int) -> tuple[Any, ...]:
        state = {"weights": torch.full((BYTES // 4,), float(number))}
        transport = transports[number]
        options = {"checkpoint_transport": transport, "timeout": TIMEOUT, "min_replica_size": GROUPS}
        with manager(all_at_once, f"r{number}", state, **options) as m:
            ready.wait(60)
            committed, attempts = False, 0
            while not committed and attempts < STEPS_AT_MOST:
                attempts += 1
                m.start_quorum()
                gradient = torch.full((1,), float(number))
                m.allreduce(gradient).wait()
                committed = m.should_commit()
            end.wait(60)
            return committed, attempts, gradient.item(), state["weights"].unique().tolist()

    try:
        got = together(*(lambda number=number: group(number) for number in range(GROUPS)))
        sent = sum(one.sent for one in transports)
    finally:
        for one in transports:
            one.shutdown()
    committed, attempts, mean, weights = got[0]
    assert got == [got[0]] * GROUPS
    assert (committed, attempts, mean) == (True, 1, 2.5)
    assert len(weights) == 1
    assert sent < 7 * BYTES, "each joiner takes one copy, perhaps a part of one in vain"


@pytest.mark.parametrize("sync", [False, True], ids=["first step", "synchronous quorum"])
def test_a_joiner_that_heals_for_longer_than_the_timeout_fails_nobodys_step(lighthouse: str, sync: bool) -> None:
    """Progress counts, not the total time; and no group waits for it in a collective."""
    ready, end = threading.Barrier(2), threading.Barrier(2)
    transports = {name: LimitedUplink(SECOND, RATE / 2) for name in "ab"}

    def group(name: str) -> tuple[Any, ...]:
        state = {"weights": torch.full((BYTES // 4,), float(ord(name)))}
        options = {"checkpoint_transport": transports[name], "timeout": SECOND, "use_async_quorum": not sync}
        with manager(lighthouse, name, state, min_replica_size=2, **options) as m:
            if sync and name == "a":
                m.load_state_dict({"step": 5, "batches_committed": 10, "lineage": 3})
            ready.wait(60)
            m.start_quorum()
            gradient = torch.full((1,), float(ord(name)))
            worked = m.allreduce(gradient).wait()
            end.wait(30)
            return worked, m.should_commit(), gradient.item(), m.current_step(), state["weights"].unique().tolist()

    try:
        a, b = together(lambda: group("a"), lambda: group("b"))
    finally:
        for one in transports.values():
            one.shutdown()
    assert a == b == (True, True, 97.5, 6 if sync else 1, [float(ord("a"))])


def test_a_heal_that_fails_before_the_first_step_is_tried_again_from_the_same_start_quorum(lighthouse: str) -> None:
    ready, end = threading.Barrier(2), threading.Barrier(2)
    flaky = Flaky(timeout=20 * SECOND, num_chunks=0, hostname="127.0.0.1")

    def group(name: str) -> tuple[Any, ...]:
        options = {"checkpoint_transport": flaky} if name == "b" else {}
        state = {"weights": torch.full((4,), float(ord(name)))}
        with manager(lighthouse, name, state, min_replica_size=2, **options) as m:
            ready.wait(60)
            m.start_quorum()
            gradient = torch.full((1,), float(ord(name)))
            m.allreduce(gradient).wait()
            end.wait(30)
            return m.should_commit(), gradient.item(), state["weights"].unique().tolist()

    try:
        assert together(lambda: group("a"), lambda: group("b")) == [(True, 97.5, [97.0])] * 2
        assert flaky.tries == 2
    finally:
        flaky.shutdown()


def test_a_group_that_cannot_heal_fails_the_step_of_all_with_its_reason_and_not_for_ever(lighthouse: str) -> None:
    """A quorum needs both groups, so the one that cannot heal is not parted."""
    ready, end = threading.Barrier(2, lambda: change_policy(lighthouse, min_replicas=2)), threading.Barrier(2)

    class Unreachable(HTTPTransport[dict[str, Any]]):
        def recv_checkpoint(self, *_where: Any, **_options: Any) -> dict[str, Any]:
            raise TransferError("no route to the source")

    unreachable = Unreachable(20 * SECOND, 0, "127.0.0.1")

    def group(name: str) -> tuple[bool, str]:
        transport = unreachable if name == "b" else None
        state = {"w": torch.ones(1)}
        with manager(lighthouse, name, state, min_replica_size=2, checkpoint_transport=transport) as m:
            ready.wait(60)
            m.start_quorum()
            end.wait(30)
            return m.should_commit(), str(m.errored())

    try:
        (a, why), (b, reason) = together(lambda: group("a"), lambda: group("b"))
    finally:
        unreachable.shutdown()
    assert (a, b, reason) == (False, False, "no route to the source")
    assert "a group had to heal before the step" in why


def test_a_joiner_that_is_too_slow_is_left_behind_and_has_more_time_in_its_next_attempt(lighthouse: str) -> None:
    ready, healed = threading.Barrier(2, lambda: wait_shorter(lighthouse)), threading.Event()
    transports = {name: LimitedUplink(5 * SECOND, RATE / 3) for name in "ab"}

    def group(name: str) -> tuple[int, list[float]]:
        state = {"weights": torch.full((BYTES // 4,), float(ord(name)))}
        alone = 0
        with manager(lighthouse, name, state, checkpoint_transport=transports[name], timeout=5 * SECOND) as m:
            ready.wait(60)
            while not healed.is_set():
                m.start_quorum()
                m.allreduce(torch.ones(1)).wait()
                alone += m.should_commit() and m.num_participants() == 1
                if name == "b" and m.current_step():
                    healed.set()
            return alone, state["weights"].unique().tolist()

    try:
        a, b = together(lambda: group("a"), lambda: group("b"))
    finally:
        for one in transports.values():
            one.shutdown()
    assert a[0] > 0, "it went on without the joiner"
    assert a[1] == b[1]


def wait_shorter(lighthouse: str) -> None:
    """For heals."""
    change_policy(lighthouse, heal_timeout=1.0)


def test_a_group_that_is_told_to_leave_while_it_heals_does_not_ask_for_the_step_again(lighthouse: str) -> None:
    ready, over = threading.Barrier(2), threading.Event()

    def group(name: str) -> str:
        with manager(lighthouse, name, {"w": torch.ones(1)}, use_async_quorum=False, min_replica_size=2) as m:
            if name == "b":
                m.set_state_dict_fns(lambda _: m._membership.request_leave("told to"), lambda: {"w": torch.zeros(1)})
            ready.wait(60)
            try:
                m.start_quorum()
            except Drained as error:
                over.set()
                return str(error)
            return "" if over.wait(60) else "took part"

    assert together(lambda: group("a"), lambda: group("b")) == ["", "told to"]
