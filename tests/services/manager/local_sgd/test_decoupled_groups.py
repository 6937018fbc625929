"""Decoupled DiLoCo over real Managers: a slow group, one that joins, one that dies, and one that is alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep.local_sgd import Decoupled
from keepstep_mesh.errors import Drained
from tests.services.manager.groups import events, manager, place_to_meet, together
from tests.services.manager.local_sgd.test_groups import DEADLINE, Trainer, equal

GRACE = timedelta(milliseconds=20)


class Merging(Trainer):
    """A decoupled group, which notes the shared state after each of its outer steps."""

    def __init__(self, *arguments: Any, inner_seconds: float = 0.0, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.inner_seconds = inner_seconds
        self.seen: dict[int, list[torch.Tensor]] = {}
        self.groups: dict[int, int] = {}
        """Number of groups in each of its outer steps."""

    def step(self) -> None:
        time.sleep(self.inner_seconds)  # the speed of the group
        before = self.manager.current_step()
        super().step()
        if (now := self.manager.current_step()) > before:
            self.seen[now] = self.shared()
            self.groups[now] = self.manager.num_participants()


@contextmanager
def merging(
    lighthouse: str, name: str, settings: Decoupled, *, inner_seconds: float = 0.0, **of_manager: Any
) -> Iterator[Merging]:
    with manager(lighthouse, name, use_async_quorum=False, **of_manager) as m:
        yield Merging(m, ord(name[-1]), decoupled=settings, inner_seconds=inner_seconds)


def equal_at_equal_steps(*groups: Merging) -> int:
    """Compare all groups; return the number of states that another group had too."""
    states: dict[int, list[torch.Tensor]] = {}
    compared = 0
    for one in groups:
        for step, state in one.seen.items():
            if step in states:
                equal(states[step], state)
                compared += 1
            states[step] = state
    return compared


class Pace:
    """Slow groups take one inner step for each outer step of the others, unless the others wait for them."""

    def __init__(self) -> None:
        self.outer_steps = 0
        self.changed = threading.Condition()

    def goes_on(self, one: Merging) -> None:
        """A fast group took an inner step."""
        with self.changed:
            self.outer_steps = max(self.outer_steps, one.manager.current_step())
            self.changed.notify_all()

    def inner_step(self, one: Merging) -> None:
        with self.changed:
            before = self.outer_steps
            attempt = one.manager.steps.attempt
            while self.outer_steps == before and not (attempt.requested_early and attempt.quorum_formed):
                self.changed.wait(0.01)  # nothing tells that the quorum has formed
        one.step()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_slow_group_merges_what_it_trained_and_sets_no_pace(lighthouse, steps: Path, ranks) -> None:
    """All groups have equal states at equal outer steps. When the others have finished, it ends in order."""
    settings = Decoupled(min_groups=2, grace=GRACE)
    meet, caught_up, finished = threading.Barrier(3 * ranks), threading.Event(), threading.Barrier(3 * ranks)
    last: list[int] = []
    pace, places = Pace(), {name: place_to_meet() if ranks > 1 else {} for name in "abc"}

    def fast(name: str, rank: int) -> Merging:
        with merging(lighthouse, name, settings, inner_seconds=0.002, rank=rank, **places[name]) as one:
            meet.wait(DEADLINE)
            with one.block:
                while not last or one.manager.current_step() < last[0]:
                    one.step()
                    pace.goes_on(one)
                    if caught_up.is_set() and not last:
                        last.append(one.manager.current_step() + 3)
        finished.wait(DEADLINE)
        return one

    def slow(rank: int) -> Merging:
        with merging(lighthouse, "c", settings, rank=rank, **places["c"]) as one:
            meet.wait(DEADLINE)
            with pytest.raises(Drained, match=r"the job finished at step .*, and this group was behind"), one.block:
                one.block.begin()  # the others wait for it
                while len(one.seen) < 3:
                    pace.inner_step(one)
                caught_up.set()
                finished.wait(DEADLINE)
                one.until(1000)
        return one

    runs = [lambda n=name, r=rank: fast(n, r) for rank in range(ranks) for name in "ab"]
    ends = together(*runs, *(lambda r=rank: slow(r) for rank in range(ranks)))
    for rank in range(ranks):
        a, b, c = ends[2 * rank], ends[2 * rank + 1], ends[2 * ranks + rank]
        assert equal_at_equal_steps(a, b, c) >= 3 * 3
        assert len(a.seen) >= 4 * 3, "the slow group takes part in one of several outer steps"
        assert c.seen.keys() <= a.seen.keys() | b.seen.keys()
    assert events(steps).count("healed") == 2 * ranks, "only before the first inner step"
    assert "discarded" not in events(steps)


def test_groups_that_are_too_few_train_on_and_wait_after_max_periods(lighthouse) -> None:
    """A group that joins then heals, and contributes nothing: its weight is 0."""
    settings = Decoupled(min_groups=2, grace=GRACE, max_periods=3)
    trained = threading.Event()

    def stays() -> Merging:
        with merging(lighthouse, "a", settings) as one, one.block:
            one.until(1)
            while one.block._schedule.position < 3 * 4 - 1:
                one.step()
            assert one.manager.current_step() == 1
            alone = [fragment.weight for fragment in one.block._fragments]
            assert min(alone) == 11, "the fragment of the first outer step"
            assert max(alone) > 11
            trained.set()
            one.step()
            assert one.manager.current_step() == 2, "it waited"
            one.until(4)
        return one

    def leaves_and_comes_back() -> Merging:
        with merging(lighthouse, "b", settings) as one, one.block:
            one.until(1)
        assert trained.wait(DEADLINE)
        with merging(lighthouse, "b", settings) as one, one.block:
            one.block.begin()
            assert one.manager.current_step() == 2, "it took part at once"
            assert one.inner_steps == 0
            one.seen[2] = one.shared()
            one.until(4)
        return one

    a, b = together(stays, leaves_and_comes_back)
    assert equal_at_equal_steps(a, b) == 3


class Died(Exception):
    """In place of the death of a process."""


def test_an_outer_step_that_a_lost_group_interrupts_keeps_what_was_trained(lighthouse, steps: Path) -> None:
    settings = Decoupled(min_groups=2, grace=GRACE)
    meet = threading.Barrier(3)

    def survivor(name: str) -> Merging:
        with merging(lighthouse, name, settings, inner_seconds=0.002) as one:
            meet.wait(DEADLINE)
            with one.block:
                one.until(6)
        return one

    def victim() -> None:
        with merging(lighthouse, "c", settings, inner_seconds=0.002) as one, pytest.raises(Died):
            meet.wait(DEADLINE)
            with one.block:
                one.until(2)

                def die(_: float) -> None:
                    raise Died

                for fragment in one.block._fragments:
                    fragment.begin = die
                one.until(1000)

    a, b, _ = together(lambda: survivor("a"), lambda: survivor("b"), victim)
    assert equal_at_equal_steps(a, b) >= 5
    assert "discarded" in events(steps)
    assert "torn" not in events(steps)
