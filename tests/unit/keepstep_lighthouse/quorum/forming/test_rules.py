"""Rules 1 to 5: when a quorum is formed, of whom, and which reason is given. One row of a table is one situation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_lighthouse.quorum.events import Decision
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.policy import Policy, heal_limit
from tests.support.models.core_driver import Driver, announced, announces, members

TWO = Policy(min_replicas=2, join_timeout=10)
THREE = Policy(join_timeout=10, initial_replicas=3)
PATIENT = Policy(join_timeout=1000, initial_replicas=3)
BOTH = Policy(min_replicas=2, join_timeout=10, initial_replicas=3)


@dataclass(frozen=True)
class Situation:
    """``asking`` ask at time 0 in this order; ``s:`` before a name asks with shrink_only. ``seconds`` later:"""

    says: str
    previous: Sequence[str]
    healthy: Sequence[str]
    asking: Sequence[str]
    code: str
    quorum: Sequence[str] | None = None
    """None: waits."""
    seconds: float = 0
    policy: Policy = TWO
    healing: Sequence[str] = ()


SITUATIONS = [
    Situation("no group asks", "ab", "ab", "", "nobody"),
    Situation("all members ask", "ab", "ab", "ab", "fast", "ab"),
    Situation("all members ask, a joiner comes in", "ab", "abc", "cab", "fast", "abc"),
    Situation("all members ask, who is idle is not waited for", "ab", "abcde", "ab", "fast", "ab"),
    Situation("all members ask, but they are too few now", "a", "ab", "a", "min_replicas"),
    Situation("a member is gone, all others ask", "abc", "ab", "ab", "all_asking", "ab"),
    Situation("no quorum before, all ask", "", "ab", "ab", "all_asking", "ab"),
    Situation("too few ask", "", "abc", "a", "min_replicas"),
    Situation("too few ask, and time does not change that", "", "abc", "a", "min_replicas", seconds=60),
    Situation("half of the healthy groups ask", "", "abcd", "ab", "majority"),
    Situation("half of them ask, and time does not change that", "", "abcd", "ab", "majority", seconds=60),
    Situation(
        "the first quorum waits for those that the job begins with", "", "a", "a", "initial_replicas", policy=THREE
    ),
    Situation("the first quorum waits until join_timeout", "", "ab", "ab", "initial_replicas", None, 9.9, THREE),
    Situation("the first quorum waits no longer", "", "ab", "ab", "all_asking", "ab", 10, THREE),
    Situation("the first quorum waits no longer than half a request", "", "a", "a", "all_asking", "a", 300, PATIENT),
    Situation("all that the job begins with are there", "", "abc", "abc", "all_asking", "abc", policy=THREE),
    Situation("more than the job begins with", "", "abcd", "abcd", "all_asking", "abcd", policy=THREE),
    Situation("min_replicas is for ever, whatever the job begins with", "", "a", "a", "min_replicas", None, 60, BOTH),
    Situation(
        "max_replicas bounds what the job begins with",
        "",
        "ab",
        "ab",
        "all_asking",
        "ab",
        policy=Policy(1, 2, initial_replicas=3),
    ),
    Situation("a later quorum waits for no group that is gone", "abc", "ab", "ab", "all_asking", "ab", policy=THREE),
    Situation("a last member goes on alone", "abc", "a", "a", "all_asking", "a", policy=THREE),
    Situation("more than half ask", "", "abc", "ab", "stragglers"),
    Situation("more than half ask, just before join_timeout", "", "abc", "ab", "stragglers", seconds=9.9),
    Situation("more than half ask, join_timeout is over", "", "abc", "ab", "stragglers_dropped", "ab", 10),
    Situation("a member does not ask", "abc", "abc", "ab", "stragglers"),
    Situation("a member does not ask for too long", "abc", "abc", "ab", "stragglers_dropped", "ab", 10),
    Situation("shrink: a joiner stays out", "ab", "abc", ["s:a", "c", "b"], "fast", "ab"),
    Situation("shrink asked for by the joiner: it stays out itself", "ab", "abc", ["s:c", "a", "b"], "fast", "ab"),
    Situation("shrink: too few members are left", "abc", "ade", ["s:a", "d", "e"], "min_replicas"),
    Situation("shrink: no member is left at all", "ab", "cd", ["s:c", "d"], "min_replicas"),
    Situation("shrink: a lone joiner with min_replicas 1", "ab", "c", ["s:c"], "min_replicas", policy=Policy(1)),
    Situation("shrink before the first quorum", "", "ab", ["s:a", "b"], "all_asking", "ab"),
    Situation("more than max_replicas: members first", "bc", "abc", "abc", "fast", "bc", policy=Policy(1, 2)),
    Situation("max_replicas, a member gone", "bz", "abc", "abc", "all_asking", "ab", policy=Policy(1, 2)),
    Situation("max_replicas below the quorum", "abc", "abc", "abc", "fast", "ab", policy=Policy(1, 2)),
    Situation(
        "a healing member is waited for", "abc", "abc", "ab", "healing", policy=Policy(1, heal_timeout=20), healing="c"
    ),
    Situation(
        "a healing member is not waited for beyond heal_timeout, even if join_timeout is longer",
        "abc",
        "abc",
        "ab",
        "stragglers_dropped",
        "ab",
        20,
        Policy(1, heal_timeout=20, join_timeout=60),
        healing="c",
    ),
    Situation(
        "a healing member is waited for beyond join_timeout",
        "abc",
        "abc",
        "ab",
        "healing",
        None,
        19.9,
        Policy(1, heal_timeout=20, join_timeout=5),
        healing="c",
    ),
    Situation(
        "one heals, one is late: the late one is the reason",
        "abcd",
        "abcd",
        "ab",
        "stragglers",
        policy=Policy(1, heal_timeout=20),
        healing="c",
    ),
    Situation(
        "healing groups are no majority",
        "abcd",
        "abcd",
        "a",
        "stragglers_dropped",
        "a",
        20,
        Policy(1, heal_timeout=20),
        healing="bcd",
    ),
    Situation(
        "most of those that do not heal are silent",
        "abcd",
        "abcd",
        "a",
        "majority",
        None,
        60,
        Policy(1, heal_timeout=20, join_timeout=5),
        healing="b",
    ),
]


def arrange(situation: Situation) -> Driver:
    """A lighthouse that knows the previous quorum from its store, with the healthy groups connected."""
    driver = Driver(
        record=JobRecord(7 if situation.previous else 0, tuple(situation.previous), policy=situation.policy)
    )
    driver.open_all(*situation.healthy)
    for replica_id in situation.healing:
        driver.heals(replica_id)
    return driver


def ask(driver: Driver, asking: Sequence[str]) -> list[Decision]:
    decisions: list[Decision] = []
    for replica_id in asking:
        decisions += driver.asks(replica_id.removeprefix("s:"), shrink=replica_id.startswith("s:"))
    return decisions


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda s: s.says)
def test_a_quorum_is_formed_or_not_for_the_reason_that_is_given(situation: Situation) -> None:
    driver = arrange(situation)
    decisions = ask(driver, situation.asking)
    if situation.seconds and situation.quorum is not None:
        assert not announces(driver.passes(situation.seconds - 0.1) + decisions), "formed too early"
        decisions = driver.passes(0.1)
    elif situation.seconds:
        decisions += driver.passes(situation.seconds)
    view = driver.core.quorum_view(driver.now)
    if situation.quorum is None:
        assert not announces(decisions)
        assert view.reason.code == situation.code, view.reason.sentence
    else:
        assert members(announced(decisions)) == list(situation.quorum)
        assert view.formed is not None
        assert view.formed.code == situation.code, view.formed.sentence


def test_stragglers_are_counted_from_the_first_request_of_the_round() -> None:
    driver = Driver(min_replicas=1, join_timeout=10)
    driver.start("a", "b", "c", "d")
    driver.leaves("d")
    driver.asks("a", 1)
    driver.passes(6)
    driver.asks("b", 1)
    assert not announces(driver.passes(3.9))
    assert members(announced(driver.passes(0.1))) == ["a", "b"]


def test_a_request_as_long_as_the_wait_for_stragglers_gets_its_quorum() -> None:
    driver = Driver(min_replicas=1, join_timeout=60)
    driver.start("a", "b", "c")
    driver.asks("a", 1, timeout=60)
    driver.asks("b", 1, timeout=60)
    assert not announces(driver.passes(59.9))
    assert members(announced(driver.passes(0.1))) == ["a", "b"]


def test_a_request_that_was_passed_over_does_not_start_the_clock_of_the_next_round() -> None:
    driver = Driver(min_replicas=1, join_timeout=10)
    driver.start("a", "b", "c")
    driver.opens("z")
    driver.asks("z")
    driver.asks("a", 1, shrink=True)
    assert members(announced(driver.all_ask("bc", 1))) == ["a", "b", "c"]
    driver.passes(30)  # a long step
    driver.closes("c")
    driver.passes(0.2)
    driver.asks("a", 1, failures=1)
    assert driver.core.reason(driver.now).code == "stragglers"
    assert members(announced(driver.asks("b", 1, failures=1))) == ["a", "b", "z"]


def test_quorum_id_grows_with_another_membership_a_failed_commit_or_a_lost_member_and_else_stays() -> None:
    driver = Driver(min_replicas=1)
    assert driver.start("a", "b").quorum_id == 1
    assert announced(driver.all_ask("ab", 1)).quorum_id == 1
    driver.asks("a", 2)
    assert announced(driver.asks("b", 1, failures=1)).quorum_id == 2, "a failed commit"
    assert announced(driver.all_ask("ab", 2)).quorum_id == 2
    driver.open_all("c")
    driver.asks("c")
    assert announced(driver.all_ask("ab", 3)).quorum_id == 3, "a joiner"
    driver.leaves("c")
    assert announced(driver.all_ask("ab", 4)).quorum_id == 4, "a group that left"
    driver.closes("b")
    driver.passes(0.2)
    driver.opens("b")
    assert announced(driver.all_ask("ab", 5)).quorum_id == 5, "lost and back again: the others gave up quorum 4"


def test_heal_timeout_doubles_with_each_try_of_a_name_and_a_completed_heal_forgets() -> None:
    driver = Driver(min_replicas=1, heal_timeout=10)
    driver.open_all("a", "b:1")
    step = 0

    def round_with_heal(replica_id: str, limit: float, *, completes: bool) -> None:
        nonlocal step
        driver.asks(replica_id)
        assert announces(driver.asks("a", step)), "both are in"
        step += 1
        driver.heals(replica_id)
        driver.asks("a", step)
        assert not announces(driver.passes(limit - 0.1))
        assert driver.core.reason(driver.now).code == "healing"
        if not completes:
            assert members(announced(driver.passes(0.1))) == ["a"]
        else:
            assert members(announced(driver.asks(replica_id, step))) == ["a", replica_id]
        step += 1

    round_with_heal("b:1", 10, completes=False)
    round_with_heal("b:1", 20, completes=False)
    driver.leaves("b:1")
    driver.opens("b:2")
    round_with_heal("b:2", 40, completes=True)
    round_with_heal("b:2", 10, completes=False)


def test_the_time_for_a_heal_has_an_end() -> None:
    assert heal_limit(1, 10_000) == 1024


def test_a_quorum_dropped_for_a_slow_heal_says_whom_it_dropped() -> None:
    driver = Driver(min_replicas=1, heal_timeout=10)
    driver.start("a", "b")
    driver.heals("b")
    driver.asks("a", 1)
    driver.passes(10)
    reason = driver.core.reason(driver.now)
    assert reason.code == "stragglers_dropped"
    assert reason.sentence == "quorum 2, 1 member: the wait for b timed out"


groups = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)


@given(
    previous=groups,
    healthy=groups,
    data=st.data(),
    min_replicas=st.integers(1, 4),
    max_replicas=st.sampled_from([0, 4, 5]),
    late=st.booleans(),
)
def test_the_counts_decide_as_the_written_rules_do_on_sets(
    previous: list[str], healthy: list[str], data: st.DataObject, min_replicas: int, max_replicas: int, late: bool
) -> None:
    """The core counts; SEMANTICS speaks of sets. Both give the same answer for every situation."""
    policy = Policy(min_replicas, max_replicas, join_timeout=10)
    asking = data.draw(st.lists(st.sampled_from(healthy), unique=True)) if healthy else []
    shrinking = set(data.draw(st.lists(st.sampled_from(asking), unique=True))) if asking else set()
    driver = Driver(record=JobRecord(7 if previous else 0, tuple(sorted(previous)), policy=policy))
    driver.open_all(*healthy)
    got: list[str] | None = None
    for number in range(len(asking) + 1):
        if number:
            one = asking[number - 1]
            decisions = driver.asks(one, shrink=one in shrinking)
        elif number == len(asking):
            decisions = []
        else:
            continue
        expected = by_the_book(set(previous), set(healthy), set(asking[:number]), shrinking, policy, late=False)
        got = members(announced(decisions)) if announces(decisions) else None
        assert got == expected
        if got is not None:
            return
    if late and asking:
        expected = by_the_book(set(previous), set(healthy), set(asking), shrinking, policy, late=True)
        decisions = driver.passes(10)
        assert (members(announced(decisions)) if announces(decisions) else None) == expected


def by_the_book(
    previous: set[str], healthy: set[str], asking: set[str], shrinking: set[str], policy: Policy, *, late: bool
) -> list[str] | None:
    candidates = asking & previous if asking & shrinking and previous else set(asking)
    if policy.max_replicas:
        first = sorted(candidates, key=lambda one: (one not in previous, one))
        candidates = set(first[: policy.max_replicas])
    if len(candidates) < policy.min_replicas:
        return None
    if previous and previous <= asking:
        return sorted(candidates)
    if len(asking) <= len(healthy) // 2:
        return None
    if asking != healthy and not late:
        return None
    return sorted(candidates)


def test_quorum_id_grows_beyond_the_lineages_that_members_bring_from_another_lighthouse() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a", 5, lineage=40)
    assert announced(driver.asks("b", 5, lineage=7)).quorum_id == 41
    driver.asks("a", 6, lineage=41)
    assert announced(driver.asks("b", 6, lineage=41)).quorum_id == 41, "its own ids are nothing new"
