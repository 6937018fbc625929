"""Decisions about durable checkpoints: which are due, who uploads them and where, what a job resumes from."""

from __future__ import annotations

import pytest

from keepstep.checkpoint.managed.due_checkpoints import (
    Commit,
    Held,
    RelayHealth,
    Stored,
    choose_relays,
    follow_seconds,
    is_due,
    newest,
)
from keepstep.relay_client.upload_share import UPLOAD_PATIENCE_SECONDS, UploadShare

MEMBERS = ("a:1", "b:2", "c:3")


@pytest.mark.parametrize(
    ("step", "every", "saved", "due"),
    [
        (10, 5, None, True),
        (10, 5, (5, 1), True),
        (10, 5, (10, 7), False),
        (11, 5, (10, 7), False),
        (0, 5, None, False),
        (10, 0, None, False),
        (10, 5, (10, 1), True),
        (8, 5, (10, 1), True),
        (8, 0, (10, 1), False),
    ],
)
def test_a_checkpoint_is_due_every_so_many_steps_and_once_in_each_history(
    step: int, every: int, saved: Held | None, *, due: bool
) -> None:
    assert is_due((step, 7), every, saved) is due


def test_all_groups_derive_one_name_that_no_other_commit_has() -> None:
    commit = Commit(1, 7, 12, MEMBERS)
    names = {
        commit.checkpoint_id(),
        commit.checkpoint_id(2),
        Commit(2, 7, 12, MEMBERS).checkpoint_id(),
        Commit(1, 7, 12, ("a:9", *MEMBERS[1:])).checkpoint_id(),
        Commit(1, 8, 12, MEMBERS).checkpoint_id(),
    }
    assert len(names) == 5, "also when a lighthouse that lost its store counts from 1 again"
    assert all(name.startswith("step-12-") for name in names)


def test_the_first_uploader_changes_with_the_step_and_there_are_few_of_them() -> None:
    assert Commit(1, 1, 3, MEMBERS).uploaders() == MEMBERS
    assert Commit(1, 1, 4, MEMBERS).uploaders() == ("b:2", "c:3", "a:1")
    assert Commit(1, 1, 5, MEMBERS).uploaders(most=1) == ("c:3",)
    many = tuple(f"{number:04}:x" for number in range(1000))
    assert len(Commit(1, 1, 999, many).uploaders()) == 8


def test_groups_that_share_no_upload_take_turns_also_if_their_number_divides_that_of_the_steps() -> None:
    turns = [Commit(1, 1, step, MEMBERS).uploaders(every=30, most=1) for step in (30, 60, 90, 120)]
    assert turns == [("b:2",), ("c:3",), ("a:1",), ("b:2",)]
    assert Commit(1, 1, 3, MEMBERS).uploaders(every=0, most=1) == ("a:1",)


def test_followers_of_a_large_job_ask_a_relay_a_hundred_times_a_second_together() -> None:
    assert follow_seconds(2) == 0.5
    assert 8000 / follow_seconds(8000) == pytest.approx(100)


def test_a_job_keeps_its_relays_and_replaces_one_that_is_gone() -> None:
    relays = [f"http://r{number}:1" for number in range(6)]
    two = choose_relays(relays, "job", 2)
    assert choose_relays(reversed(relays), "job", 2) == two
    left = [one for one in relays if one != two[0]]
    assert two[1] in choose_relays(left, "job", 2)
    assert {tuple(choose_relays(relays, f"job-{number}", 1)) for number in range(50)} == {(one,) for one in relays}
    assert choose_relays(relays[:1], "job", 2) == relays[:1]


def test_a_relay_that_failed_is_avoided_for_longer_each_time_unless_no_other_is_left() -> None:
    health = RelayHealth()
    health.failed("a", 100.0)
    assert health.usable(["a", "b"], 129.0) == ["b"]
    assert health.usable(["a"], 129.0) == ["a"]
    assert health.usable(["a", "b"], 130.0) == ["a", "b"]
    health.failed("a", 130.0)
    assert health.usable(["a", "b"], 189.0) == ["b"]
    health.worked("a")
    assert health.usable(["a", "b"], 131.0) == ["a", "b"]


def stored(relay: str, step: int, quorum_id: int, committed: float = 0.0) -> Stored:
    return Stored(relay, f"step-{step}-{quorum_id}", step, quorum_id, 1, committed)


def test_a_job_resumes_from_its_last_life_and_there_from_the_highest_step() -> None:
    gave_up = stored("r1", 20, 5, committed=300.0)
    here, there = stored("r1", 11, 6, committed=100.0), stored("r2", 11, 6, committed=99.0)
    assert newest([gave_up, here, stored("r2", 10, 6), there]) == [here, there]
    assert newest([]) == []


def test_a_job_does_not_resume_from_what_a_script_saved_by_itself() -> None:
    by_hand, written = stored("r1", 900, 0, committed=500.0), stored("r1", 10, 3)
    assert newest([by_hand, written]) == [written]
    assert newest([by_hand]) == []


def test_a_share_is_sent_first_and_that_of_a_silent_uploader_after_some_patience() -> None:
    share = UploadShare(place=1, uploaders=2, chunks=5)
    assert share.choose(0b11111, 0.0) == 0b01010
    share.sent(0b01010, 0.1)
    assert share.choose(0b10101, 1.0) == 0
    assert share.choose(0b10100, 1.4) == 0, "the other one is at work"
    assert share.choose(0b10100, 1.4 + UPLOAD_PATIENCE_SECONDS) == 0
    assert share.choose(0b10100, 1.5 + UPLOAD_PATIENCE_SECONDS) == 0b10100


def test_where_chunks_take_long_the_others_get_more_time() -> None:
    share = UploadShare(place=0, uploaders=2, chunks=4)
    share.sent(0b0101, 4.0)
    assert share.choose(0b1010, 10.0) == 0
    assert share.choose(0b1010, 17.9) == 0
    assert share.choose(0b1010, 18.1) == 0b1010
