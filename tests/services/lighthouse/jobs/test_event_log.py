"""The event log: its numbers, what it keeps, and the file behind it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep_chaos.histories.reading import check_files
from keepstep_lighthouse.jobs import event_log
from keepstep_lighthouse.jobs.event_log import EventLog, FiledEventLog
from keepstep_lighthouse.store.contract import StoreError

DEADLINE = 60.0


def fill(events: EventLog, count: int, job: str = "job") -> list[int]:
    return [events.add(job, "joined", f"r{number}", {"number": number}, 1.5).id for number in range(count)]


async def opened(path: Path) -> FiledEventLog:
    events = FiledEventLog(path)
    await events.open()
    return events


def ids(events: EventLog, job: str = "job", after: int = 0) -> list[int]:
    return [one.id for one in events.after(job, after, 1_000_000)]


def test_numbers_grow_with_the_epoch_and_never_go_back() -> None:
    events = EventLog()
    events.begin_epoch(1)
    first = fill(events, 2)
    events.begin_epoch(3)
    second = fill(events, 1)
    events.begin_epoch(2)
    third = fill(events, 1)
    assert first == [(1 << 32) + 1, (1 << 32) + 2]
    assert second == [(3 << 32) + 1]
    assert third[0] > second[0]


def test_a_job_keeps_its_last_events_and_says_what_was_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT_PER_JOB", 10)
    events = EventLog()
    made = fill(events, 1000)
    other = fill(events, 3, "other")
    kept = ids(events)
    assert 10 <= len(kept) <= 11
    assert kept == made[-len(kept) :]
    assert events.missed("job", kept[0] - 2)
    assert not events.missed("job", kept[0] - 1)
    assert ids(events, "other") == other
    assert ids(events, "nobody") == []


async def test_a_follower_is_woken_by_events_of_its_job_only() -> None:
    events = EventLog()
    waiting = asyncio.create_task(events.notifier.wait("job", asyncio.get_running_loop().time() + DEADLINE))
    await asyncio.sleep(0)
    fill(events, 1, "other")
    _, pending = await asyncio.wait((waiting,), timeout=0.05)  # nothing tells that nothing comes
    assert pending
    fill(events, 1)
    await waiting


async def written(events: FiledEventLog) -> None:
    """Returns when all that was added is in the file."""
    if events._writing is not None:
        await events._writing


async def test_the_file_brings_back_what_happened_before_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "events.jsonl"
    events = await opened(path)
    events.begin_epoch(1)
    made = fill(events, 100)
    await events.close()
    term, *written = map(json.loads, path.read_text().splitlines())
    assert [line["id"] for line in written] == made
    assert (term["id"], term["job"], term["kind"]) == (made[0] - 1, "", "term")

    again = await opened(path)
    again.begin_epoch(1)
    assert ids(again) == made
    assert fill(again, 1)[0] > made[-1], "a lighthouse with a new store numbers on from the file"
    await again.close()


async def test_the_file_brings_back_only_the_end_of_a_job_that_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = await opened(path)
    events.begin_epoch(1)
    fill(events, 3)
    end = events.add("job", "job_deleted", "", {"by": "admin"}, 1.5)
    events.forget("job")
    await events.close()

    again = await opened(path)
    again.begin_epoch(2)
    assert again.endings == {"job": end}
    assert ids(again) == [end.id]
    made = fill(again, 2)
    assert [one.id for one in again.newest("job", 10)] == made == ids(again), "a new job of that name begins again"
    await again.close()


async def test_the_event_log_of_two_terms_and_a_kill_between_them_is_a_valid_history(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    for epoch in (1, 7):
        events = await opened(path)
        events.begin_epoch(epoch)
        fill(events, 3)
        events.begin_epoch(epoch + 5)  # a worker knew a higher one
        events.add("job", "quorum", "", {"quorum_id": epoch, "members": ["a:1"]}, 1.5)
        await events.close()
        with path.open("a") as file:
            file.write('{"id": 3, "ti')
    report = check_files([path])
    assert report.fine, report.violations
    assert (report.records, report.epochs) == (12, 4)
    assert [told for told in report.not_covered if "is cut off" in told] == [
        f"{path}:{line} is cut off in the middle, as a kill leaves it" for line in (7, 14)
    ]


async def test_a_log_without_its_first_part_is_a_valid_history_that_begins_in_the_middle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "MAX_FILE_BYTES", 2000)
    events = await opened(tmp_path / "events.jsonl")
    events.begin_epoch(1)
    for _ in range(20):
        fill(events, 10)
        await written(events)
    await events.close()
    report = check_files([tmp_path])
    assert (report.fine, report.event_logs) == (True, 1)
    assert f"{tmp_path / 'events.jsonl'} begins in the middle" in report.not_covered


async def test_half_a_line_from_a_kill_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = await opened(path)
    made = fill(events, 2)
    await events.close()
    with path.open("ab") as file:
        file.write(b'{"id": 3, "ti\n\xff\xfe\n[]\n{"id": 4}')
    again = await opened(path)
    assert ids(again) == made
    more = fill(again, 1)
    await again.close()
    third = await opened(path)
    assert ids(third) == made + more
    await third.close()


async def test_the_file_is_rotated_and_its_size_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_FILE_BYTES", 2000)
    path = tmp_path / "events.jsonl"
    events = await opened(path)
    made = []
    for _ in range(20):
        made += fill(events, 10)
        await written(events)
    await events.close()
    assert sorted(os.listdir(tmp_path)) == ["events.jsonl", "events.jsonl.1"]  # noqa: PTH208
    again = await opened(path)
    assert ids(again) == made[-len(ids(again)) :]
    await again.close()


async def test_a_disk_that_takes_nothing_costs_events_of_the_file_only(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events = await opened(path)
    path.unlink()
    path.mkdir()
    made = fill(events, 3)
    await events.close()
    assert ids(events) == made


FILLER = """
import asyncio, os, resource, sys
from pathlib import Path
from keepstep_lighthouse.jobs.event_log import FiledEventLog

async def main(path: Path) -> None:
    events = FiledEventLog(path)
    await events.open()
    events.begin_epoch(1)
    for number in range(6):
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        full = path.stat().st_size + 20 if number in (2, 3) else most
        resource.setrlimit(resource.RLIMIT_FSIZE, (full, most))
        events.add("job", "joined", f"r{number}", {}, 1.5)
        await events._writing
    await events.close()

asyncio.run(main(Path(sys.argv[1])))
"""


def test_events_lost_to_a_full_disk_leave_a_gap_and_the_next_line_is_whole(tmp_path: Path) -> None:
    """The limit on file sizes is what the kernel offers everywhere to make a real write fail."""
    path = tmp_path / "events.jsonl"
    subprocess.run([sys.executable, "-c", FILLER, path], check=True, timeout=DEADLINE)
    assert [json.loads(line)["replica_id"] for line in path.read_text().splitlines()] == ["", "r0", "r1", "r4", "r5"]
    assert check_files([path]).counts == {"gap": 1}


async def test_a_path_that_cannot_be_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="give another --event-log"):
        await opened(tmp_path)


async def test_events_that_a_slow_disk_leaves_out_are_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_log, "MAX_UNWRITTEN", 5)
    events = await opened(tmp_path / "events.jsonl")
    fill(events, 8)
    await events.close()
    assert "the disk is too slow" in caplog.text


def copy_all(source: EventLog, target: EventLog) -> None:
    for one in source.of_all_jobs_after(0, 1_000_000):
        target.copy(one)


def test_copies_of_two_logs_are_in_order_and_each_event_is_there_once() -> None:
    first, second = EventLog(), EventLog()
    for epoch, owner in ((1, first), (2, second), (3, first)):
        owner.begin_epoch(epoch)
        fill(owner, 3)
    late = ids(first)
    for _ in range(2):
        copy_all(first, second)
        copy_all(second, first)
    assert ids(first) == ids(second) == sorted({*late, *ids(second)})
    assert len(ids(first)) == 9
    assert (first.counts["job"]["joined"], second.counts["job"]["joined"]) == (6, 3)


def test_a_deleted_job_stays_deleted_at_other_lighthouses_and_a_new_one_of_its_name_keeps_its_events() -> None:
    leader, follower, late = EventLog(), EventLog(), EventLog()
    leader.begin_epoch(1)
    fill(leader, 3)
    copy_all(leader, follower)
    copy_all(leader, late)
    leader.add("job", "job_deleted", "", {"by": "an admin"}, 2.0)
    leader.forget("job")
    copy_all(leader, follower)
    assert follower.jobs == set()
    assert follower.endings["job"].detail == {"by": "an admin"}
    copy_all(late, follower)
    assert follower.jobs == set(), "an event from before the deletion does not come back"
    made = fill(leader, 2)
    copy_all(leader, follower)
    copy_all(leader, late)
    assert ids(follower) == ids(late) == made


def test_a_job_that_the_leader_dropped_is_dropped_with_its_copies() -> None:
    leader, follower = EventLog(), EventLog()
    leader.begin_epoch(1)
    fill(leader, 2)
    copy_all(leader, follower)
    follower.forget_others(())
    assert ids(follower) == []


def test_copies_stay_within_the_limit_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT_PER_JOB", 10)
    old, new = EventLog(), EventLog()
    old.begin_epoch(1)
    fill(old, 10)
    new.begin_epoch(2)
    fill(new, 100)
    kept = ids(new)
    copy_all(old, new)
    assert ids(new) == kept
