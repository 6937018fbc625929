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
from keepstep.runtime.exits import DivergedExit
from keepstep_mesh.exit_codes import EXIT_DIVERGED
from tests.services.manager.groups import SECOND, Flaky, manager, place_to_meet, together

STEPS = 8
FLIPPED_AT = 3

Act = Callable[[Manager, dict[str, Any]], None]


class Job:
    """Requests of an administrator to the lighthouse of these groups."""

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self.said: list[str] = []
        """Reasons with which groups ended."""
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


def test_equal_states_with_other_orders_of_keys_are_equal(job: Job) -> None:
    def train(name: str, order: int) -> Any:
        state = {"w": torch.ones(4), "more": {"x": 1, "y": torch.zeros(2)}}
        with job.group(name, state) as m:
            m.set_state_dict_fns(state.update, lambda: dict([*state.items()][::order]))
            while m.current_step() < STEPS:
                step(m, state)
            return m.finish().groups

    assert together(lambda: train("a", 1), lambda: train("b", 1), lambda: train("c", -1)) == [3, 3, 3]
    assert job.found("replicas_verified")
    assert not job.found("replicas_differ")


# ---- where groups finish


def finishes(
    job: Job, name: str, rate: Callable[[int], float] = lambda _: 1.0, *, steps: int = STEPS, **options: Any
) -> tuple[int | None, list[float]]:
    """Train, and finish: the code of the exit (None: ``finish`` returned), and the weights.

    ``rate``: the learning rate of each step, which the script does not register.
    """
    state = {"w": torch.ones(4)}
    with manager(job.lighthouse, name, state, **options) as m:
        job.ready.wait(30)
        try:
            while m.current_step() < steps:
                m.start_quorum()
                gradient = torch.ones(4)
                m.allreduce(gradient).wait()
                if m.should_commit():
                    state["w"] = state["w"] + rate(m.current_step()) * gradient
            m.finish()
        except DivergedExit as ended:
            job.said.append(str(ended))
            return int(str(ended.code)), state["w"].tolist()
        return None, state["w"].tolist()


def of_size(lighthouse: str, groups: int, **policy: Any) -> Job:
    job = Job(lighthouse)
    job.ready = threading.Barrier(groups, lambda: job.change(**policy) if policy else None)
    return job


def test_a_group_that_differs_at_the_end_heals_and_finishes_equal(lighthouse: str) -> None:
    job = of_size(lighthouse, 3, verify_every=1000)

    def other_in_last(step: int) -> float:
        return 2.0 if step == STEPS else 1.0

    ends = together(
        lambda: finishes(job, "a"), lambda: finishes(job, "b"), lambda: finishes(job, "c", rate=other_in_last)
    )
    assert ends == [(None, [1.0 + STEPS] * 4)] * 3
    (found,) = job.found("replica_diverged")
    assert (found["replica_id"][0], found["detail"]) == ("c", {"step": STEPS, "action": "heal"})
    (closed,) = job.found("closed")
    assert closed["detail"]["step"] == STEPS


def test_a_group_that_differs_again_after_a_heal_is_refused_by_name_and_the_others_finish(lighthouse: str) -> None:
    job = of_size(lighthouse, 3)
    first, second, other = together(
        lambda: finishes(job, "a", steps=20),
        lambda: finishes(job, "b", steps=20),
        lambda: finishes(job, "c", lambda _: 1.1, steps=20),
    )
    assert first == second == (None, [21.0] * 4)
    assert other[0] == EXIT_DIVERGED
    (why,) = job.said
    assert "the weights of c differ from those of a, b after step 10 again: it had to heal" in why
    assert [one["detail"]["action"] for one in job.found("replica_diverged")] == ["heal", "refuse"]
    assert [one["detail"]["step"] for one in job.found("replica_diverged")] == [3, 10]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_of_two_groups_that_differ_at_the_end_none_finishes(lighthouse: str, asynchronous: bool) -> None:
    job = of_size(lighthouse, 2)
    options = {"use_async_quorum": asynchronous, "steps": 2}
    ends = together(lambda: finishes(job, "a", **options), lambda: finishes(job, "b", lambda _: 1.5, **options))
    assert [code for code, _ in ends] == [EXIT_DIVERGED] * 2
    assert all("with different weights (a against b), and no majority tells which are right" in why for why in job.said)
    assert not job.found("closed")


def test_two_groups_that_differ_are_told_while_they_train(lighthouse: str, caplog: pytest.LogCaptureFixture) -> None:
    job = of_size(lighthouse, 2)
    together(lambda: finishes(job, "a", steps=6), lambda: finishes(job, "b", lambda _: 1.5, steps=6))
    told = [line for line in caplog.messages if line.startswith("weights of groups differ")]
    assert len(told) == 2  # once a group
    assert all("the weights of the groups differ after step 3 (a against b)" in line for line in told)
    assert all("register all state" in line for line in told)


def test_a_group_whose_weights_differ_by_design_finishes(lighthouse: str) -> None:
    """Groups that average their parameters by hand hold their own ones between two averages."""
    job = of_size(lighthouse, 2)

    def local(name: str, own: float) -> int:
        state = {"w": torch.ones(4)}
        with manager(lighthouse, name, state, init_sync=False) as m:
            job.ready.wait(30)
            m.start_quorum(allow_heal=False)
            average = state["w"].clone()
            m.allreduce(average).wait()
            assert m.should_commit()
            state["w"] = average + own  # local steps
            return m.finish().step

    assert together(lambda: local("a", 1.0), lambda: local("b", 2.0)) == [1, 1]
