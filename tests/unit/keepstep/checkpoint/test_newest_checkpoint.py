"""How the ranks of a group find the newest durable checkpoint, although relays or rank 0 are slow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch.distributed import HashStore

from keepstep.checkpoint.managed import newest_checkpoint
from keepstep.checkpoint.managed.due_checkpoints import Stored
from keepstep.checkpoint.managed.newest_checkpoint import find_newest
from keepstep.checkpoint.managed.rank_agreement import RANK_ROUNDS, value_of_rank
from keepstep.connection.http_connection import BrokenConnection, Endpoint
from keepstep_mesh.errors import KeepstepError


def test_all_relays_are_asked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    relays = [Endpoint.of(f"http://relay{number}:1", dict) for number in range(3)]
    all_asked = threading.Barrier(len(relays))

    def stored_at(relay: Endpoint, _job: str) -> list[Stored]:
        all_asked.wait(60)
        return [Stored(relay.address, "step-1-1-a", 1, 1, 1, 0.0)]

    monkeypatch.setattr(newest_checkpoint, "stored_at", stored_at)
    found, _ = find_newest(lambda: relays, "job", seconds=0.0)
    assert [one.relay for one in found] == [relay.address for relay in relays]


A, B = (Endpoint.of(f"http://{name}:1", dict) for name in "ab")


def search(
    monkeypatch: pytest.MonkeyPatch, answers: Callable[[int], list[Stored] | None], wait: float, copies: int = 1
) -> tuple[int, int]:
    """Return the step of the newest one, and how often relay b was asked. ``answers`` has what b does each time."""
    asked = 0

    def stored_at(relay: Endpoint, _job: str) -> list[Stored]:
        nonlocal asked
        if relay is A:
            return [Stored(A.address, "step-1-1-a", 1, 1, 1, 0.0)]
        asked += 1
        if (found := answers(asked)) is None:
            raise BrokenConnection("refused")
        return found

    named = iter([[A, B], [A]])  # the lighthouse no longer names a relay that is away for long
    monkeypatch.setattr(newest_checkpoint, "stored_at", stored_at)
    monkeypatch.setattr(newest_checkpoint, "FIND_PAUSE_SECONDS", 0.01)
    (one,), _ = find_newest(lambda: next(named, []), "job", seconds=0.0, wait=wait, copies=copies)
    return one.step, asked


def test_a_relay_that_comes_back_soon_with_a_newer_checkpoint_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = [Stored(B.address, "step-5-1-a", 5, 1, 1, 0.0)]
    assert search(monkeypatch, lambda asked: newer if asked == 4 else None, wait=30.0) == (5, 4)


def test_an_older_checkpoint_is_taken_after_the_wait_and_the_log_names_the_silent_relay(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, asked = search(monkeypatch, lambda _: None, wait=0.1)
    assert step == 1
    assert asked > 1
    waiting, taken = (record.getMessage() for record in caplog.records)
    assert "waiting for relays that may have a newer durable checkpoint" in waiting
    assert "taking a durable checkpoint although relays that may have a newer one do not answer" in taken
    assert B.address in waiting
    assert B.address in taken


def test_with_copies_at_other_relays_one_that_is_silent_costs_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert search(monkeypatch, lambda _: None, wait=30.0, copies=2) == (1, 1)


def test_a_job_whose_relay_is_not_registered_yet_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    newer = Stored(B.address, "step-5-1-a", 5, 1, 1, 0.0)
    monkeypatch.setattr(newest_checkpoint, "stored_at", lambda relay, _: [newer] if relay is B else [])
    monkeypatch.setattr(newest_checkpoint, "FIND_PAUSE_SECONDS", 0.01)
    registered = [A]

    def absent() -> list[str]:
        if B in registered:
            return []
        registered.append(B)  # a moment later
        return ["b"]

    assert find_newest(lambda: list(registered), "job", seconds=0.0, wait=30.0, absent=absent) == ([newer], {})
    with pytest.raises(KeepstepError, match=r"relay b, which had the newest one, is not registered; .*resume=False"):
        find_newest(lambda: [A], "job", seconds=0.0, absent=lambda: ["b"])


def test_a_damaged_newest_checkpoint_waits_for_a_silent_relay_that_may_have_another_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older, damaged = (Stored(A.address, f"step-{step}-1-a", step, 1, 1, 0.0, lacking=step - 1) for step in (1, 2))
    asked = 0

    def stored_at(relay: Endpoint, _job: str) -> list[Stored]:
        nonlocal asked
        if relay is A:
            return [older, damaged]
        asked += 1
        if asked < 3:
            raise BrokenConnection("refused")
        return [replace(damaged, relay=B.address, lacking=0)]

    monkeypatch.setattr(newest_checkpoint, "stored_at", stored_at)
    monkeypatch.setattr(newest_checkpoint, "FIND_PAUSE_SECONDS", 0.01)
    (whole, part), skipped = find_newest(lambda: [A, B], "job", seconds=0.0, wait=30.0, copies=2)
    assert (whole.relay, whole.step, part.relay, skipped) == (B.address, 2, A.address, {})
    damage = {(one.address, damaged.id): f"chunk 1 from {one.address} arrived damaged" for one in (A, B)}
    (one,), skipped = find_newest(lambda: [A, B], "job", seconds=0.0, copies=2, damage=damage)
    assert one == older
    assert skipped == {damaged.id: f"step 2 ({damaged.id}): {'; '.join(damage.values())}"}


def test_a_rank_waits_for_rank_0_that_comes_later_to_its_first_step() -> None:
    store = HashStore()
    waits: list[int] = []

    def still_waiting() -> None:
        waits.append(1)
        if len(waits) == 2:
            store.set("choice", "{}")

    assert value_of_rank(0, store, "choice", 0.01, still_waiting) == b"{}"
    assert len(waits) == 2


def test_a_rank_does_not_wait_for_rank_0_for_ever() -> None:
    waits: list[int] = []
    with pytest.raises(KeepstepError, match=r"rank 0 of this group did not begin its first step within 0.1 s"):
        value_of_rank(0, HashStore(), "choice", 0.01, lambda: waits.append(1))
    assert len(waits) == RANK_ROUNDS
