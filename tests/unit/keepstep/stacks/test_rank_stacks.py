"""A rank answers about its training thread while that hangs, and ends when its group was found to hang."""

from __future__ import annotations

import os
import queue
import re
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep.runtime.loop_thread import LoopThread
from keepstep.stacks.activity import Activity, Progress
from keepstep.stacks.rank_stacks import StackReporter
from keepstep_mesh.exit_codes import EXIT_HUNG
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import Drain
from keepstep_mesh.protocol.stack_messages import (
    MAX_CHILDREN,
    MAX_FRAME_TEXT,
    MAX_FRAMES,
    MAX_THREADS,
    RankStacks,
    StacksRequest,
    ThreadStack,
    bounded,
)

DEADLINE = 60.0


class Rank:
    """A reporter on an event-loop thread; this thread is the training thread."""

    def __init__(self) -> None:
        self.activity = Activity()
        self.loop_thread = LoopThread()
        self.reporter = StackReporter(3, self.activity)
        self.answers: queue.SimpleQueue[RankStacks] = queue.SimpleQueue()
        self.loop_thread.loop.call_soon_threadsafe(self.reporter.start, self.answers.put)

    def ask(self, number: int) -> None:
        self.loop_thread.loop.call_soon_threadsafe(self.reporter.on_push, StacksRequest(number))

    def answer(self, number: int) -> RankStacks:
        self.ask(number)
        found = self.answers.get(timeout=DEADLINE)
        frame = codec.encode(found)
        assert codec.decode(frame) == found  # the lighthouse takes it
        return found


@pytest.fixture
def rank() -> Iterator[Rank]:
    one = Rank()
    yield one
    one.loop_thread.stop()


def test_an_answer_tells_where_the_training_thread_stands(rank: Rank) -> None:
    rank.activity.progress = lambda: Progress(7, 2, "all-reduce 2 of 5")
    found = rank.answer(11)
    assert (found.number, found.rank, found.step, found.collectives) == (11, 3, 7, 2)
    assert (found.in_flight, found.waits, found.section) == ("all-reduce 2 of 5", "", "")
    assert "found = self.answers.get(timeout=DEADLINE)" in found.line
    assert found.stacks[0].frames[-1].endswith("Rank.answer")
    assert any(one.thread == "MainThread" for one in found.stacks)


def test_the_innermost_section_is_told_with_its_time_and_its_limit(rank: Rank) -> None:
    with rank.activity.section("epoch", 60.0), rank.activity.section("evaluate", 600.0):
        found = rank.answer(1)
    assert (found.section, found.section_limit_ms) == ("evaluate", 600_000)
    assert found.section_ms >= 0
    assert rank.answer(2).section == ""


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_section_without_time_is_an_error(limit: float) -> None:
    with pytest.raises(ValueError, match="section 'evaluate' has the limit"), Activity().section("evaluate", limit):
        pass


@pytest.mark.parametrize("limit", [1e30, float("inf")])
def test_a_section_with_a_limit_that_no_message_can_have_is_told_all_the_same(rank: Rank, limit: float) -> None:
    with rank.activity.section("evaluate" * 100_000 + "\udc80\x1b", limit):
        found = rank.answer(1)
    assert found.section == ("evaluate" * 100)[:MAX_FRAME_TEXT]


def test_names_that_no_message_can_have_do_not_keep_a_rank_from_its_answer(rank: Rank) -> None:
    ready, end = threading.Event(), threading.Event()
    names: dict[str, object] = {"ready": ready, "end": end}
    exec(compile("def stand():\n ready.set()\n end.wait()\n", "/tmp/\udcff\n.py", "exec"), names)
    thread = threading.Thread(target=names["stand"], name="\udcff" + "x" * 2_000_000)  # type: ignore[arg-type]
    thread.start()
    try:
        assert ready.wait(DEADLINE)
        found = rank.answer(1)
    finally:
        end.set()
        thread.join()
    [other] = [one for one in found.stacks if one.thread.startswith("\\udcffx")]
    assert len(other.thread) == MAX_FRAME_TEXT
    assert any("\\udcff\\n.py:3 stand" in frame for frame in other.frames)


def test_the_largest_answer_fits_into_a_frame() -> None:
    wide = "\U0001f525" * (2 * MAX_FRAME_TEXT)
    stack = ThreadStack(wide, (wide,) * (2 * MAX_FRAMES))
    text = dict.fromkeys(("line", "waits", "section", "in_flight", "device", "recorder"), wide)
    found = bounded(RankStacks(1, 1, stacks=(stack,) * 100, children=(wide,) * 100, **text))
    assert (len(found.stacks), len(found.stacks[0].frames), len(found.children)) == (
        MAX_THREADS,
        MAX_FRAMES,
        MAX_CHILDREN,
    )
    frame = codec.encode(found)
    assert len(frame) <= codec.MAX_FRAME_BYTES
    assert codec.decode(frame) == found


def test_a_dead_file_system_costs_facts_and_no_answer_and_not_a_thread_each_time(rank: Rank, tmp_path: Path) -> None:
    """The source line is in a FIFO that no process writes to. An answer takes two seconds then."""
    script = tmp_path / "train.py"
    os.mkfifo(script)
    names: dict[str, object] = {"ask": rank.ask, "get": rank.answers.get}
    step = "def step():\n for number in (1, 2, 3):\n  ask(number)\n  yield get(timeout=60)\n"
    exec(compile(step, str(script), "exec"), names)
    try:
        found: list[RankStacks] = list(names["step"]())  # type: ignore[operator]
        assert [(one.number, one.line) for one in found] == [(number, "train.py:4 step") for number in (1, 2, 3)]
        assert sum(one.name == "keepstep-stacks" for one in threading.enumerate()) == 1
    finally:
        os.close(os.open(script, os.O_RDWR))
        for one in threading.enumerate():
            if one.name == "keepstep-stacks":
                one.join(DEADLINE)


def test_messages_that_are_not_about_stacks_are_left_to_others(rank: Rank) -> None:
    assert not rank.reporter.on_push(Drain("maintenance"))


HANGS = """
import asyncio, os, sys, threading, time
from keepstep.runtime.loop_thread import LoopThread
from keepstep.stacks.activity import Activity
from keepstep.stacks.rank_stacks import StackReporter
from keepstep_mesh.protocol.stack_messages import Hung, StacksRequest

loop, reporter = LoopThread().loop, StackReporter(0, Activity())
answered = threading.Event()
loop.call_soon_threadsafe(reporter.start, lambda found: answered.set())

reads, writes = os.pipe()

def worker_that_hangs():
    os.write(writes, b"x")
    while True:
        time.sleep(60)

pid = os.fork()
if not pid:
    worker_that_hangs()
os.read(reads, 1)  # it runs: a child that the kernel has not started yet has no stack
print(pid, flush=True)

def ask():
    while not answered.wait(3):
        pass
    loop.call_soon_threadsafe(reporter.on_push, Hung("r1 rank 0 waits in train.py:8 lock.acquire() for 74 s"))

loop.call_soon_threadsafe(reporter.on_push, StacksRequest(1))
threading.Thread(target=ask, daemon=True).start()

def step_that_hangs():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

step_that_hangs()
"""


def child_has_ended(pid: int) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], DEADLINE)[0])
    finally:
        os.close(handle)


def test_a_group_that_hangs_writes_its_stacks_and_those_of_its_children_and_ends_with_them() -> None:
    run = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert run.returncode == EXIT_HUNG, run.stderr
    pid = int(run.stdout)
    assert "this group hangs: r1 rank 0 waits in train.py:8 lock.acquire() for 74 s" in run.stderr
    assert "in step_that_hangs" in run.stderr
    assert re.search(rf"child process: python {pid} (sleeps|runs)\b", run.stderr)
    assert "worker_that_hangs" in run.stderr
    assert child_has_ended(pid)


def test_a_group_that_hangs_ends_although_the_disk_of_its_log_is_full() -> None:
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-c", HANGS], stdout=subprocess.PIPE, stderr=full, timeout=DEADLINE, check=False
        )
    assert run.returncode == EXIT_HUNG
    assert child_has_ended(int(run.stdout))
