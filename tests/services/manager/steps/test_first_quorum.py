"""A group that waits for its quorum in ``start_quorum``: it logs why, asks again, and still ends on SIGTERM."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import queue
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from keepstep import Manager
from keepstep.coordination import LighthouseServer
from keepstep.runtime.exits import EvictedExit, GroupFailedExit
from keepstep_mesh.errors import Drained
from tests.services.manager.groups import SECOND, manager, place_to_meet, together

SOON = timedelta(milliseconds=300)
DEADLINE = 60


@pytest.fixture
def two_needed() -> Iterator[str]:
    """A lighthouse whose quorums have at least two groups."""
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000)
    yield server.address()
    server.shutdown()


@pytest.fixture
def asked_again() -> Iterator[queue.Queue[str]]:
    """The log lines of ranks that ask again."""
    lines: queue.Queue[str] = queue.Queue()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "asking again" in record.getMessage():
                lines.put(record.getMessage())

    handler = Handler()
    logging.getLogger("keepstep.manager").addHandler(handler)
    yield lines
    logging.getLogger("keepstep.manager").removeHandler(handler)


def hear_the_reason(lines: queue.Queue[str], times: int = 1) -> bool:
    """Wait until so many lines give the reason. A busy lighthouse may not have told it in the first one."""
    while times:
        times -= "1 of at least 2 groups" in lines.get(timeout=DEADLINE)
    return True


def order(lighthouse: str, path: str) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{lighthouse}/v1/jobs/default/replicas/{path}", b'{"reason": "new machine"}', headers
    )
    with urllib.request.urlopen(request, timeout=60):
        pass


def asking(lighthouse: str) -> int:
    """Return the number of groups that ask for a quorum."""
    with urllib.request.urlopen(f"{lighthouse}/v1/jobs/default/quorum", timeout=60) as answer:
        return len(json.load(answer)["asking"])


def change_policy(lighthouse: str, **changes: Any) -> None:
    headers, body = {"Content-Type": "application/json"}, json.dumps(changes).encode()
    url = f"{lighthouse}/v1/jobs/default"
    with urllib.request.urlopen(urllib.request.Request(url, body, headers, method="PATCH"), timeout=60):
        pass


def step(m: Manager) -> bool:
    m.start_quorum()
    m.allreduce(torch.ones(1)).wait()
    return m.should_commit()


def ranks_of(count: int, rank: Callable[..., Any]) -> list[Callable[[], Any]]:
    """One call for each rank of a group, with where they meet."""
    place = {**place_to_meet(), "world_size": count} if count > 1 else {}
    return [lambda number=number: rank(**place, **({"rank": number} if place else {})) for number in range(count)]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_first_step_logs_the_reason_and_asks_until_enough_groups_are_there(two_needed, asked_again, sync, ranks):
    enough_waited, done = threading.Event(), threading.Barrier(2 * ranks)

    def early(**place: Any) -> bool:
        with manager(two_needed, "a", quorum_timeout=SOON, use_async_quorum=not sync, **place) as m:
            committed = step(m)
            done.wait(DEADLINE)
            return committed

    def late(**place: Any) -> bool:
        assert enough_waited.wait(DEADLINE)
        with manager(two_needed, "b", use_async_quorum=not sync, **place) as m:
            committed = step(m)
            done.wait(DEADLINE)
            return committed

    def watch() -> bool:
        named = hear_the_reason(asked_again, 3 * ranks)
        enough_waited.set()
        return named

    assert together(watch, *ranks_of(ranks, early), *ranks_of(ranks, late)) == [True] * (1 + 2 * ranks)


def test_a_later_synchronous_step_asks_again_too(two_needed, asked_again):
    first_step_done = threading.Barrier(2)
    back = threading.Event()

    def survivor() -> list[bool]:
        with manager(two_needed, "a", use_async_quorum=False) as m:
            committed = [step(m)]
            first_step_done.wait(DEADLINE)
            m._steps._settings = dataclasses.replace(m._steps._settings, quorum_timeout=SOON)
            committed.append(step(m))
            back.set()
            return committed

    def comes_and_goes() -> bool:
        with manager(two_needed, "b", use_async_quorum=False) as m:
            step(m)
            first_step_done.wait(DEADLINE)
        assert hear_the_reason(asked_again)
        with manager(two_needed, "b", use_async_quorum=False) as m:
            committed = step(m)
            assert back.wait(DEADLINE)
            return committed

    assert together(survivor, comes_and_goes) == [[True, True], True]


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_with_a_timeout_of_its_own_start_quorum_raises_and_the_next_call_asks_again(two_needed, sync):
    told = 0
    with manager(two_needed, "a", use_async_quorum=not sync) as m:
        while told < 2:  # on a busy machine the lighthouse may answer later
            with pytest.raises(TimeoutError) as error:
                m.start_quorum(timeout=SOON)
            told += "1 of at least 2 groups" in str(error.value)
    assert told == 2


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["SIGTERM", "drain", "evict"])
def test_a_group_that_waits_for_its_first_quorum_ends_at_once_when_it_is_told_to(
    two_needed, asked_again, ended, how, ranks
):
    limit = 30 * SECOND if how == "evict" else SOON
    managers: queue.Queue[Manager] = queue.Queue()

    def rank(**place: Any) -> type[BaseException]:
        with manager(two_needed, "a", quorum_timeout=limit, **place) as m:
            managers.put(m)
            try:
                m.start_quorum()
            except SystemExit as error:
                return type(error)
            return type(None)

    def tell() -> float:
        told = [managers.get(timeout=DEADLINE) for _ in range(ranks)]
        if how != "evict":
            asked_again.get(timeout=DEADLINE)
        with contextlib.ExitStack() as by_signal:  # ends them too when the order is refused
            for one in told:
                by_signal.callback(one._membership.request_leave, "SIGTERM")
            if how != "SIGTERM":
                order(two_needed, f"a/{how}")
                by_signal.pop_all()
        return time.monotonic()

    since, *errors = together(tell, *ranks_of(ranks, rank))
    assert errors == [EvictedExit if how == "evict" else Drained] * ranks
    assert time.monotonic() - since < 10


def test_a_signal_to_one_rank_ends_its_group_although_that_waits_for_a_quorum(two_needed, ended):
    """The machine of rank 1 is preempted, so rank 0 ends as one whose group has failed."""
    told: queue.Queue[Manager] = queue.Queue()

    def rank(**place: Any) -> type[BaseException] | None:
        with manager(two_needed, "a", quorum_timeout=1000 * SECOND, **place) as m:
            if place["rank"]:
                told.put(m)
            try:
                m.start_quorum()
            except SystemExit as error:
                return type(error)
        return None

    def preempt() -> None:
        one = told.get(timeout=DEADLINE)
        while not asking(two_needed):
            time.sleep(0.05)  # until the request of both ranks has reached the lighthouse
        one._membership.request_leave("SIGTERM")

    assert together(preempt, *ranks_of(2, rank)) == [None, GroupFailedExit, Drained]


def test_a_rank_whose_sibling_is_late_asks_again_and_the_group_begins_with_it(lighthouse, asked_again):
    waited, done = threading.Event(), threading.Barrier(2)

    def rank(rank: int, **place: Any) -> bool:
        with manager(lighthouse, "a", rank=rank, quorum_timeout=SOON, **place) as m:
            if rank == 1:
                assert waited.wait(DEADLINE)
            committed = step(m)
            done.wait(DEADLINE)
            return committed

    def watch() -> str:
        line = asked_again.get(timeout=DEADLINE)
        waited.set()
        return line

    line, *committed = together(watch, *ranks_of(2, rank))
    assert "ranks [1] of this group" in line
    assert committed == [True, True]
