"""Groups whose weights ought to be equal and are not: found by their root digests, named, and healed."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from keepstep import Manager
from tests.services.manager.groups import SECOND, Flaky, manager, place_to_meet, together

STEPS = 8
FLIPPED_AT = 3

Act = Callable[[Manager, dict[str, Any]], None]


class Job:
    """Requests of an administrator to the lighthouse of these groups."""

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self.ends = threading.Barrier(3)
        self.ready = threading.Barrier(3, lambda: self.change(verify_every=1))

    def change(self, **policy: Any) -> None:
        self._ask("PATCH", "", policy)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            f"{self.lighthouse}/v1/jobs/default{path}",
            data=None if body is None else json.dumps(body).encode(),
            method=method,
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return json.load(answer)

    def found(self, kind: str) -> list[dict[str, Any]]:
        return [one for one in self._ask("GET", "/events")["events"] if one["kind"] == kind]

    @contextmanager
    def group(self, name: str, state: dict[str, Any], **options: Any) -> Iterator[Manager]:
        with manager(self.lighthouse, name, state, min_replica_size=2, **options) as m:
            self.ready.wait(30)
            yield m
            self.ends.wait(30)

    def train(self, name: str, act: Act = lambda _m, _state: None, *, steps: int = STEPS, **options: Any) -> Any:
        """Weights after each committed step; ``act`` comes before each step."""
        state, after = {"w": torch.full((4,), float(ord(name)))}, {}
        with self.group(name, state, **options) as m:
            while m.current_step() < steps:
                act(m, state)
                step(m, state)
                after[m.current_step()] = state["w"].tolist()
        return after


def step(m: Manager, state: dict[str, Any], *, allow_heal: bool = True) -> bool:
    m.start_quorum(allow_heal=allow_heal)
    gradient = torch.ones(4)
    m.allreduce(gradient).wait()
    committed = m.should_commit()
    if committed:
        state["w"] = state["w"] + gradient
    return committed


@pytest.fixture
def job(lighthouse: str) -> Job:
    return Job(lighthouse)


def flip(_m: Manager, state: dict[str, Any]) -> None:
    """Flip a bit of one weight, not so low that rounding would repair it."""
    state["w"] = state["w"].clone()
    state["w"].view(torch.int32)[2] ^= 1 << 20


def flips_once(m: Manager, state: dict[str, Any]) -> None:
    if m.current_step() == FLIPPED_AT:
        flip(m, state)


@pytest.mark.parametrize("sync", [False, True], ids=["async", "sync"])
def test_a_flipped_bit_is_found_named_and_healed_in_the_step_after(job: Job, sync: bool) -> None:
    how = {"use_async_quorum": not sync}
    a, b, c = together(
        lambda: job.train("a", **how), lambda: job.train("b", **how), lambda: job.train("c", flips_once, **how)
    )
    assert a == b
    assert {at for at in a if a[at] != c[at]} == {FLIPPED_AT + 1}
    (found,) = job.found("replica_diverged")
    assert found["replica_id"].startswith("c:")
    assert found["detail"] == {"step": FLIPPED_AT, "action": "heal"}
    (differ,) = job.found("replicas_differ")
    assert differ["detail"]["diverged"] == [found["replica_id"]]
    verified = [one["detail"]["step"] for one in job.found("replicas_verified")]
    assert verified == [at for at in range(1, STEPS - 1) if at != FLIPPED_AT]


def flaky() -> Flaky:
    """It heals at the first step, and fails the next time."""
    transport = Flaky(timeout=20 * SECOND, num_chunks=0, hostname="127.0.0.1")
    transport.fails_at = 2
    return transport


def test_a_heal_that_fails_leaves_a_group_that_nobody_takes_for_healthy(job: Job) -> None:
    lineages = []

    def looks(m: Manager, state: dict[str, Any]) -> None:
        lineages.append(str(m._context.progress.lineage).partition(":")[0])
        flips_once(m, state)

    a, _, c = together(
        lambda: job.train("a"), lambda: job.train("b"), lambda: job.train("c", looks, checkpoint_transport=flaky())
    )
    assert lineages.count("diverged") == 1
    assert a[STEPS] == c[STEPS]
    assert len(job.found("replica_diverged")) == 1


def test_a_group_that_may_not_heal_goes_on_as_it_is_and_heals_when_it_may(job: Job) -> None:
    def never(name: str, act: Act = lambda _m, _state: None) -> Any:
        state = {"w": torch.full((4,), 1.0)}
        with job.group(name, state, init_sync=False) as m:
            while m.current_step() < STEPS:
                act(m, state)
                assert step(m, state, allow_heal=False)
            apart = state["w"].tolist()
            for _ in range(2):
                assert step(m, state)
            return apart, state["w"].tolist()

    a, b, c = together(lambda: never("a"), lambda: never("b"), lambda: never("c", flips_once))
    assert a == b
    assert a[0] != c[0]
    assert a[1] == c[1]
    assert [one["replica_id"][0] for one in job.found("replica_diverged")] == ["c"]


@pytest.mark.parametrize("fails", [False, True], ids=["", "one rank of it at its second try"])
def test_of_a_group_whose_second_rank_diverged_all_ranks_heal(lighthouse: str, ended: Any, fails: bool) -> None:
    job = Job(lighthouse)
    job.ready, job.ends = threading.Barrier(6, lambda: job.change(verify_every=1)), threading.Barrier(6)
    places = {name: place_to_meet() for name in "abc"}

    def rank(name: str, number: int) -> Any:
        if (name, number) != ("c", 1):
            return job.train(name, rank=number, **places[name])
        options = {"checkpoint_transport": flaky()} if fails else {}
        return job.train(name, flips_once, rank=number, **places[name], **options)

    ranks = [(name, number) for name in "abc" for number in (0, 1)]
    after = together(*(lambda one=one: rank(*one) for one in ranks))
    assert [weights[STEPS] for weights in after] == [after[0][STEPS]] * 6
    assert after[-1][FLIPPED_AT + 1] != after[0][FLIPPED_AT + 1]
    (found,) = job.found("replica_diverged")
    assert (found["replica_id"][0], found["detail"]["step"]) == ("c", FLIPPED_AT)
    assert ended.empty()


def test_the_state_after_a_failed_step_is_not_compared(job: Job) -> None:
    """BatchNorm's statistics, say: the next step that commits averages them."""
    failed = []

    def fails_once(m: Manager, state: dict[str, Any]) -> None:
        if m.current_step() != FLIPPED_AT or failed:
            return
        failed.append(1)
        flip(m, state)
        m.start_quorum()
        m.wait_quorum()
        m.report_error(RuntimeError("out of memory"))
        assert not m.should_commit()
        flip(m, state)  # back

    a, b, c = together(lambda: job.train("a"), lambda: job.train("b"), lambda: job.train("c", fails_once))
    assert a[STEPS] == b[STEPS] == c[STEPS]
    assert job.found("replicas_verified")
    assert not job.found("replicas_differ")


def test_a_group_whose_state_cannot_be_compared_trains_on_and_is_named(job: Job) -> None:
    def unreadable(m: Manager, _state: dict[str, Any]) -> None:
        if m.current_step() == FLIPPED_AT:
            m.disallow_state_dict_read()

    together(lambda: job.train("a"), lambda: job.train("b"), lambda: job.train("c", unreadable))
    missing = {one["detail"]["step"]: one["detail"]["missing"] for one in job.found("replicas_verified")}
    assert missing[FLIPPED_AT - 1] == []
    assert [one[0] for one in missing[FLIPPED_AT]] == ["c"]
