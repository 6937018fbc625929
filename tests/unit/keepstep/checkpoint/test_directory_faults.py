"""Saves to a directory that are killed, or find the disk full, in front of each change of the file system."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch

from keepstep import checkpoint
from keepstep.checkpoint import CheckpointAborted, CheckpointError, CheckpointNotFound
from keepstep.checkpoint.places import rank_files
from keepstep.checkpoint.places.directory import DirectoryTarget
from keepstep.checkpoint.places.rank_files import RankFiles
from keepstep.checkpoint.saving import save_facts
from keepstep.connection.deadline import Deadline

TIMEOUT = timedelta(seconds=30)
STATE = {"w": torch.arange(3000.0), "v": torch.ones(5)}
CHANGES = ("fsync", "link", "mkdir", "open", "replace", "rmdir", "unlink")


@contextlib.contextmanager
def at_change(number, act, changes=CHANGES):
    """Call ``act`` in front of the ``number``-th change of the file system from here on."""
    counts, usual = itertools.count(1), {name: getattr(os, name) for name in changes}

    def counting(name):
        def change(*arguments, **how):
            if next(counts) == number:
                act()
            return usual[name](*arguments, **how)

        return change

    for name in changes:
        setattr(os, name, counting(name))
    try:
        yield
    finally:
        for name in changes:
            setattr(os, name, usual[name])


def killed():
    os.kill(os.getpid(), signal.SIGKILL)


def full():
    raise OSError(errno.ENOSPC, "No space left on device")


def in_child(work):
    """Run ``work`` in a fork of this process. Return whether it was killed."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
    return os.waitstatus_to_exitcode(status) != 0


def is_committed(place):
    """Return whether a checkpoint is visible. It is whole then, and else another save gets through."""
    into = {key: torch.zeros_like(value) for key, value in STATE.items()}
    try:
        checkpoint.load(into, place, timeout=TIMEOUT)
    except CheckpointNotFound:
        return False
    assert all(into[key].equal(value) for key, value in STATE.items())
    return True


def save_both(place):
    with ThreadPoolExecutor(2) as pool:
        saving = [
            pool.submit(checkpoint.save, STATE, place, rank=rank, world_size=2, timeout=TIMEOUT) for rank in range(2)
        ]
        for one in saving:
            one.result()


pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def test_a_save_that_is_killed_leaves_a_whole_checkpoint_or_none(tmp_path):
    outcomes = []
    for number in itertools.count(1):
        place = tmp_path / str(number)

        def save(place=place, number=number):
            with at_change(number, killed):
                checkpoint.save(STATE, place)

        if not in_child(save):
            break
        outcomes.append(is_committed(place))
        if not outcomes[-1]:
            checkpoint.save(STATE, place)
            assert is_committed(place)
            assert {one.name for one in place.iterdir()} == {"checkpoint.json", "manifest-0", "pack-0"}
    assert outcomes == sorted(outcomes), "once it is visible, it stays"
    assert outcomes.count(False) >= 8
    assert outcomes.count(True) >= 4


def test_two_ranks_that_are_killed_in_a_commit_leave_a_whole_checkpoint_or_none(tmp_path, monkeypatch):
    outcomes = []
    usual = DirectoryTarget._commit
    for number in itertools.count(1):
        place = tmp_path / str(number)

        def commit(target, roots, number=number):
            with at_change(number, killed, ("link", "replace")):
                usual(target, roots)

        monkeypatch.setattr(DirectoryTarget, "_commit", commit)
        if not in_child(lambda place=place: save_both(place)):
            break
        monkeypatch.setattr(DirectoryTarget, "_commit", usual)
        outcomes.append(is_committed(place))
        if not outcomes[-1]:
            save_both(place)
            assert is_committed(place)
    assert {True, False} == set(outcomes)


def test_a_full_disk_at_any_moment_is_an_error_that_leaves_nothing_or_comes_after_the_commit(tmp_path):
    errors = []
    for number in itertools.count(1):
        place = tmp_path / str(number)
        hit = []
        with at_change(number, lambda hit=hit: (hit.append(1), full())):
            try:
                checkpoint.save(STATE, place)
            except CheckpointError as error:
                errors.append(str(error))
        if not hit:
            break
        if not is_committed(place):
            assert len(errors) == number, "a save that returned is committed"
            assert not place.exists()
            checkpoint.save(STATE, place)
    assert len(errors) >= 8
    for error in errors:
        assert "No space left on device; earlier checkpoints are intact: free space there" in error


def rank_files_of(place, world_size):
    deadline = Deadline(TIMEOUT.total_seconds(), "not saved")
    ranks = [
        RankFiles(place, save_facts(rank, world_size, 0, "durable"), deadline, lambda: None)
        for rank in range(world_size)
    ]
    for one in ranks:
        one.begin()
    return ranks


def interrupt_after_seen(monkeypatch, rank):
    usual = rank_files.write_whole

    def write_whole(path, content, **how):
        usual(path, content, **how)
        if path.name == f"seen-{rank}":
            raise InterruptedError("SIGTERM")

    monkeypatch.setattr(rank_files, "write_whole", write_whole)


@pytest.mark.parametrize("fails", [0, 1])
def test_a_failure_at_the_end_of_the_exchange_reaches_the_rank_that_is_past_it(tmp_path, monkeypatch, fails):
    interrupt_after_seen(monkeypatch, fails)
    ranks = rank_files_of(tmp_path, 2)
    with ThreadPoolExecutor(1) as pool:
        failing = pool.submit(ranks[fails].exchange, b"layout")
        ranks[1 - fails].exchange(b"layout")
        ranks[fails].fail(repr(failing.exception()))
    with pytest.raises(CheckpointAborted, match="SIGTERM"):
        if fails == 1:
            ranks[0].roots()
        else:
            ranks[1].wait_for_commit(lambda: False)


def test_rank_0_tells_the_ranks_that_are_past_the_exchange_of_a_failure_that_it_finds_in_it(tmp_path, monkeypatch):
    rank_0, usual = threading.local(), rank_files.read

    def exchange_of_rank_0():
        rank_0.is_here = True
        ranks[0].exchange(b"layout")

    def read(path):  # a shared file system shows rank 0 the last file late
        late = path.name == "seen-1" and hasattr(rank_0, "is_here")
        return None if late else usual(path)

    monkeypatch.setattr(rank_files, "read", read)
    interrupt_after_seen(monkeypatch, 1)
    ranks = rank_files_of(tmp_path, 3)
    with ThreadPoolExecutor(2) as pool:
        waiting, failing = pool.submit(exchange_of_rank_0), pool.submit(ranks[1].exchange, b"layout")
        ranks[2].exchange(b"layout")
        ranks[1].fail(repr(failing.exception()))
        ranks[0].fail(str(waiting.exception()))
    with pytest.raises(CheckpointAborted, match="rank 1 failed: InterruptedError"):
        ranks[2].wait_for_commit(lambda: False)
