"""Stacks have names and lines, no values, and tell for whom a thread waits."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from keepstep.stacks.thread_stacks import (
    CHECKPOINT,
    COMPILATION,
    script_line,
    short_path,
    shown_line,
    thread_stacks,
    waits_for,
    waits_for_children,
)


def test_the_line_of_the_script_has_no_text_in_quotes() -> None:
    found = script_line(sys._getframe()), "a secret"
    assert found[0] is not None
    assert shown_line(found[0]).endswith('found = script_line(sys._getframe()), "..."')
    assert f"test_thread_stacks.py:{sys._getframe().f_lineno - 3} " in shown_line(found[0])


def test_a_thread_that_waits_in_the_standard_library_for_the_script_waits_for_no_other_group() -> None:
    ready, end = threading.Event(), threading.Event()

    def wait() -> None:
        ready.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        ready.wait()
        assert thread.ident is not None
        stacks, frame = thread_stacks(thread.ident)
        assert waits_for(frame) == ""
        assert "end.wait()" in shown_line(script_line(frame)) or "ready.set()" in shown_line(script_line(frame))
        del frame
        assert any(stack.endswith("wait") for stack in stacks[0].frames)
    finally:
        end.set()
        thread.join()


def test_a_thread_that_writes_with_torch_save_waits_for_a_checkpoint() -> None:
    read, write = os.pipe()
    with os.fdopen(read, "rb", buffering=0) as reader, os.fdopen(write, "wb") as writer:
        thread = threading.Thread(target=torch.save, args=(torch.zeros(1 << 20), writer))
        thread.start()
        assert reader.read(1)  # the pipe is full until it is read: the thread stands in its write
        assert thread.ident is not None
        _, frame = thread_stacks(thread.ident)
        assert waits_for(frame) == CHECKPOINT
        del frame
        rest = threading.Thread(target=reader.readall)
        rest.start()
        thread.join()
        writer.close()
        rest.join()


def compile_until(end: threading.Event) -> None:
    while not end.is_set():
        torch._dynamo.reset()
        torch.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(2))


def test_a_thread_that_compiles_has_the_limit_of_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import of the compiler takes seconds."""
    # torch.compile reads this. It keeps a module of an earlier test if two threads left their forward passes crosswise.
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)
    end = threading.Event()
    thread = threading.Thread(target=compile_until, args=(end,))
    thread.start()
    assert thread.ident is not None
    try:
        until = time.monotonic() + 100
        while waits_for(sys._current_frames()[thread.ident]) != COMPILATION:
            assert time.monotonic() < until
            time.sleep(0.001)  # samples, as the lighthouse takes them
    finally:
        end.set()
        thread.join()


class SlowNumbers(list[int]):
    def __init__(self, gate: threading.Event, ready: threading.Event) -> None:
        super().__init__(range(8))
        self.gate, self.ready = gate, ready

    def __getitem__(self, place):  # type: ignore[no-untyped-def,override]
        self.ready.set()
        self.gate.wait()
        return super().__getitem__(place)


def test_a_thread_that_waits_for_a_loader_waits_for_its_workers() -> None:
    gate, ready = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: next(iter(DataLoader(SlowNumbers(gate, ready), 4))))
    thread.start()
    try:
        ready.wait()
        assert thread.ident is not None
        assert waits_for_children(sys._current_frames()[thread.ident])
        assert not waits_for_children(sys._getframe())
    finally:
        gate.set()
        thread.join()


def test_a_script_is_named_by_its_file_also_in_a_folder_that_is_called_keepstep() -> None:
    assert short_path("/home/me/keepstep/train.py") == "train.py"
    assert short_path(thread_stacks.__code__.co_filename) == "keepstep/stacks/thread_stacks.py"
