"""Groups that hang: bad answers, orders in the middle of a verdict, groups that drain, stand by, or came too late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep_lighthouse.quorum.events import Decision, Tell
from keepstep_lighthouse.quorum.hangs import hangs
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.protocol.stack_messages import (
    MAX_FRAME_TEXT,
    MAX_FRAMES,
    MAX_THREADS,
    Hung,
    RankStacks,
    StacksRequest,
    ThreadStack,
)
from tests.support.models.core_driver import Driver, announced

LIMIT = 8.0
STANDS = RankStacks(1, 0, "train.py:8 next(batches)", stacks=(ThreadStack("MainThread", ("train.py:8 step",)),))


def training(groups: int = 3, hang_after: float | None = LIMIT, **policy: float) -> Driver:
    """Groups that have taken four steps and work on the fifth."""
    driver = Driver(Policy(min_replicas=1, hang_after=hang_after, verify_every=0, **policy))  # type: ignore[arg-type]
    names = [f"r{number}" for number in range(groups)]
    for name in names:
        driver.opens(name)
    for step in range(5):
        for name in names:
            driver.asks(name, step, 1 if step else "")
        driver.passes(0.1)
    return driver


def stand(driver: Driver, seconds: float, *names: str, found: RankStacks = STANDS) -> list[Decision]:
    """Let groups stand in one line for some seconds, and answer each second."""
    decisions: list[Decision] = []
    for _ in range(round(seconds)):
        decisions += driver.passes(1.0)
        for name in names:
            if name in driver.session_of:
                driver.stacks(name, found)
    return decisions


def ended(decisions: list[Decision]) -> bool:
    return any(isinstance(one, Tell) and isinstance(one.message, Hung) for one in decisions)


def asked(decisions: list[Decision]) -> bool:
    return any(isinstance(one, Tell) and isinstance(one.message, StacksRequest) for one in decisions)


def test_answers_are_kept_within_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangs, "MAX_RANKS", 4)
    driver = training()
    stack = ThreadStack("x" * 4096, ("y" * 4096,) * 1000)
    for rank in (*range(10), 1 << 60):
        driver.stacks("r1", replace(STANDS, rank=rank, stacks=(stack,) * 1000, children=("z" * 4096,) * 1000))
    _, known = driver.core.stacks("r1", 0)["r1"]
    assert sorted(known) == [0, 1, 2, 3]
    assert len(known[0].stacks) == MAX_THREADS
    assert len(known[0].stacks[0].frames) == MAX_FRAMES
    assert len(known[0].children[0]) == MAX_FRAME_TEXT


def test_the_rank_that_holds_up_the_job_is_told_with_its_seconds_until_it_goes_on() -> None:
    driver = training(join_timeout=1000.0)
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1)
    stand(driver, 6, "r1", found=replace(STANDS, rank=2))
    [(who, seconds)] = driver.core.held_up().items()
    assert who == ("r1", 2)
    assert 4 <= seconds <= 6
    driver.asks("r1", 5, 1)
    driver.passes(2.0)
    assert driver.core.held_up() == {}


def test_answers_that_no_one_asked_for_end_no_group() -> None:
    driver = training()
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1)
    for _ in range(100):
        driver.stacks("r1", STANDS)
    assert not ended(driver.passes(LIMIT))


def test_a_group_that_has_never_answered_is_not_ended() -> None:
    driver = training(heartbeat_timeout=1000.0)
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1, timeout=10_000)
    assert not ended(driver.passes(400 * LIMIT))


@pytest.mark.parametrize(("before", "after"), [(0.0, LIMIT), (None, LIMIT), (3600.0, LIMIT)])
def test_a_limit_that_is_set_while_a_group_hangs_holds_for_it(before: float | None, after: float) -> None:
    driver = training(hang_after=before, join_timeout=1000.0)
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1)
    assert not ended(stand(driver, 20, "r1"))
    driver.sets_policy(replace(driver.record.policy, hang_after=after))
    assert ended(stand(driver, 12, "r1"))


def test_a_limit_that_is_turned_off_in_the_middle_of_a_verdict_ends_it() -> None:
    driver = training(join_timeout=1000.0)
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1)
    assert asked(stand(driver, 7, "r1"))
    driver.sets_policy(replace(driver.record.policy, hang_after=0.0))
    decisions = stand(driver, 30, "r1")
    assert not ended(decisions)
    assert not asked(decisions)
    assert driver.core.hang_sentences() == ()


def test_a_group_that_hangs_while_it_drains_is_ended() -> None:
    driver = training(join_timeout=1000.0)
    driver.drains("r1")
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1)
    assert ended(stand(driver, LIMIT + 2, "r1"))


def test_a_group_that_missed_a_resume_and_hangs_is_ended_though_it_took_more_steps() -> None:
    driver = Driver(Policy(min_replicas=1, hang_after=LIMIT, verify_every=0))
    for name in ("r0", "r1", "r2"):
        driver.opens(name)
    decisions = driver.asks("r0", 4, "resumed:2:2") + driver.asks("r1", 4, "resumed:2:2") + driver.asks("r2", 9, 1)
    assert announced(decisions).step == 4
    for name in ("r0", "r1"):
        driver.asks(name, 4, "resumed:2:2")
    assert ended(stand(driver, 60, "r2", found=replace(STANDS, commits=9)))


def test_a_spare_that_hangs_before_it_asks_is_ended() -> None:
    driver = training(max_replicas=3)
    driver.opens("r3", standby=True, groups=4)
    decisions: list[Decision] = []
    for step in range(5, round(30 * LIMIT) + 9):
        for name in ("r0", "r1", "r2"):
            driver.asks(name, step, 1)
        decisions += stand(driver, 1, "r3")
    assert ended(decisions)


def test_a_group_that_finished_does_as_it_likes_and_one_that_hangs_then_is_ended() -> None:
    driver = training(join_timeout=20.0, finish_grace=1.0)
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1, final=True)
    driver.passes(30.0)
    for name in ("r0", "r2"):
        driver.asks(name, 5, driver.record.quorum_id, final=True)
    driver.passes(5.0)
    if driver.record.closed is None:
        for name in ("r0", "r2"):
            driver.asks(name, 5, driver.record.quorum_id, final=True)
    assert driver.record.closed is not None
    assert ended(stand(driver, LIMIT, "r0", "r1", "r2"))
    assert {"r0", "r2"} <= set(driver.session_of)
    assert not ended(stand(driver, 40 * LIMIT, "r0", "r2"))


def test_time_in_which_a_rank_waited_for_others_is_not_its_own() -> None:
    driver = training(join_timeout=1000.0)
    for name in ("r0", "r2"):
        driver.asks(name, 5, 1)
    assert not ended(stand(driver, 12 * LIMIT, "r1", found=replace(STANDS, waits="groups", in_flight="all-reduce 1")))
    assert not ended(stand(driver, LIMIT - 2, "r1"))
    assert ended(stand(driver, 4, "r1"))


@pytest.mark.parametrize("held_back", [True, False])
def test_time_in_which_the_store_holds_back_an_answer_is_not_that_of_the_groups(held_back: bool) -> None:
    driver = training()
    announce = announced([one for name in ("r0", "r1", "r2") for one in driver.asks(name, 5, 1)])
    driver.passes(60)
    if held_back:
        driver.core.answered(announce, driver.now)
    for name in ("r0", "r1"):
        driver.asks(name, 6, 1)
    assert ended(stand(driver, LIMIT - 2, "r2")) is not held_back
    assert not held_back or ended(stand(driver, 30, "r2"))


def test_the_limit_is_not_learned_from_rounds_that_had_a_limit_of_their_own() -> None:
    driver = training(groups=2, hang_after=None, join_timeout=1000.0)
    evaluates = replace(STANDS, section="evaluate", section_ms=1, section_limit_ms=10_000_000)
    driver.asks("r0", 5, 1)
    stand(driver, 500, "r1", found=evaluates)
    driver.asks("r1", 5, 1)  # it has evaluated for 500 s
    driver.asks("r0", 6, 1)
    assert ended(stand(driver, 70, "r1"))
