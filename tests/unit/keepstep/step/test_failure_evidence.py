"""The evidence of a rank about a failed step: an error of its own, or the group servers that give no answer."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.group.ranks.merging import merge_asks
from keepstep.step.evidence import failure_evidence
from keepstep.step.evidence.failure_evidence import FailureEvidence
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.membership import MAX_PEERS, OWN, PEER, UNKNOWN, Member, MemberInfo, StepFailure
from keepstep_mesh.protocol.messages import Quorum

BROKEN = ConnectionError("closed by a peer")


@pytest.fixture
def answers() -> Iterator[str]:
    """The address of a server that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refuses() -> str:
    """The address of a process that is gone."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a server whose kernel drops the first packet of a connection, because its backlog is full."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def plan_of(**addresses: str) -> QuorumPlan:
    listed = tuple(
        Member(name, 3, 1, 0, False, MemberInfo(address)) for name, address in {"a": "", **addresses}.items()
    )
    return make_plan(Quorum(0, 1, 7, 0, 0, 3, 1, 0, True, listed), "a")


def evidence_of(plan: QuorumPlan, cause: str = UNKNOWN, timeout: float = 60.0) -> FailureEvidence:
    evidence = FailureEvidence(timeout)
    evidence.begins(plan, StepTimes(time.monotonic()))
    if cause:
        evidence.failed(cause, BROKEN)
        evidence.ended()
    return evidence


async def test_a_failed_step_names_the_groups_that_give_no_answer(answers: str, refuses: str, silent: str) -> None:
    evidence = evidence_of(plan_of(b=answers, c=silent, d=refuses))
    assert await evidence.collect() == StepFailure(7, PEER, ("c",), "ConnectionError: closed by a peer")
    assert await evidence.collect() is None, "evidence is sent once"


async def test_a_step_that_fails_while_all_groups_answer_names_none(answers: str, refuses: str) -> None:
    failure = await evidence_of(plan_of(b=answers, c=refuses)).collect()
    assert failure is not None
    assert (failure.cause, failure.peers) == (UNKNOWN, ())


async def test_a_group_that_refuses_in_two_quorums_is_named(answers: str, refuses: str) -> None:
    evidence = FailureEvidence(60.0)
    named = []
    for quorum_id in (7, 8, 9):
        plan = plan_of(b=answers, c=refuses)
        evidence.begins(replace(plan, quorum=replace(plan.quorum, quorum_id=quorum_id)), StepTimes(time.monotonic()))
        evidence.failed(UNKNOWN, BROKEN)
        failure = await evidence.collect()
        assert failure is not None
        named.append(failure.peers)
    assert named == [(), ("c",), ("c",)]


async def test_an_error_of_the_group_itself_is_reported_without_a_probe(silent: str) -> None:
    began = time.monotonic()
    failure = await evidence_of(plan_of(b=silent), OWN).collect()
    assert failure is not None
    assert failure.cause == OWN
    assert time.monotonic() - began < failure_evidence.REACH_SECONDS


async def test_a_lost_group_explains_the_failure_and_ends_the_probe(silent: str) -> None:
    evidence = evidence_of(plan_of(b=silent))
    collecting = asyncio.create_task(evidence.collect())
    await asyncio.sleep(0)  # let it begin
    evidence.member_lost(7)
    assert await collecting is None


async def test_a_group_without_an_answer_to_two_probes_of_one_stall_is_cut_off(silent: str, answers: str) -> None:
    cut: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()
    evidence = FailureEvidence(0.5, lambda *told: cut.done() or cut.set_result(told))
    evidence.begins(plan_of(b=silent, c=answers), StepTimes(time.monotonic()))
    watching = asyncio.create_task(evidence.watch())
    async with asyncio.timeout(60):
        assert await cut == (7, "this member cannot reach b")
    watching.cancel()


async def test_a_step_without_progress_is_probed_before_it_fails(silent: str, answers: str) -> None:
    evidence = evidence_of(plan_of(b=silent, c=answers), cause="", timeout=0.5)
    watching = asyncio.create_task(evidence.watch())
    assert evidence._step is not None
    async with asyncio.timeout(60):
        while not evidence._step.silent:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.02)
    watching.cancel()
    evidence.failed(UNKNOWN, BROKEN)
    evidence.ended()
    failure = await evidence.collect()
    assert failure is not None
    assert failure.peers == ("b",)


async def test_a_step_that_commits_leaves_no_evidence(answers: str) -> None:
    evidence = evidence_of(plan_of(b=answers), cause="")
    evidence.ended()
    assert await evidence.collect() is None


def test_of_many_groups_the_nearest_on_both_sides_are_probed() -> None:
    members = plan_of(**{f"m{number:03}": "" for number in range(200)}).members
    nearest = [members.index(one) for one in failure_evidence._nearest(members, 100)]
    assert sorted(nearest) == [*range(100 - MAX_PEERS // 2, 100), *range(101, 101 + MAX_PEERS // 2)]
    assert len(failure_evidence._nearest(members[:3], 0)) == 2


async def test_all_groups_begin_with_the_nearest_ones_again_when_a_group_joins(
    answers: str, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_evidence, "MAX_PEERS", 2)
    evidence = FailureEvidence(60.0)
    named = []
    for addresses in ({"e": answers}, {"e": answers, "f": silent}):
        evidence.begins(plan_of(b=answers, c=answers, d=answers, **addresses), StepTimes(time.monotonic()))
        evidence.failed(UNKNOWN, BROKEN)
        failure = await evidence.collect()
        assert failure is not None
        named.append(failure.peers)
    assert named == [(), ("f",)], "f, which joined, probes this group first: both name each other"


async def test_a_distant_group_is_probed_after_a_failed_step_that_explains_nothing(
    answers: str, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure_evidence, "MAX_PEERS", 2)
    plan = plan_of(b=answers, c=silent, d=answers, e=answers)
    evidence = FailureEvidence(60.0)
    named = []
    for _ in range(3):
        evidence.begins(plan, StepTimes(time.monotonic()))
        evidence.failed(UNKNOWN, BROKEN)
        failure = await evidence.collect()
        assert failure is not None
        named.append(failure.peers)
    assert named == [(), ("c",), ("c",)], "what was found is probed again, because a second failed step confirms it"


@pytest.mark.parametrize(
    ("failures", "merged"),
    [
        ([None, None], None),
        ([StepFailure(7, UNKNOWN), StepFailure(7, OWN)], StepFailure(7, OWN)),
        ([StepFailure(7, PEER, ("c",)), StepFailure(7, PEER, ("b",))], StepFailure(7, PEER, ("b", "c"))),
        ([StepFailure(7, UNKNOWN), StepFailure(7, PEER, ("b",))], StepFailure(7, PEER, ("b",))),
        ([StepFailure(6, OWN), StepFailure(7, UNKNOWN)], StepFailure(7, UNKNOWN)),
    ],
)
def test_the_failures_of_the_ranks_become_that_of_the_group(
    failures: list[StepFailure | None], merged: StepFailure | None
) -> None:
    asks = {rank: RankAsk(1, 3, 1, False, 1, 1000, failure=one) for rank, one in enumerate(failures)}
    assert merge_asks(asks, "a").failure == merged
