"""Deadlines for futures and blocks, and the watchdog that ends a process that cannot keep them."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch
from torch.futures import Future

from keepstep import futures
from keepstep.futures import context_timeout, future_timeout, future_wait, stream_timeout
from keepstep_mesh.exit_codes import EXIT_WATCHDOG

SOON = timedelta(milliseconds=30)
LATE = timedelta(seconds=30)


def test_a_future_in_time_gives_its_value():
    source: Future[int] = Future()
    timed = future_timeout(source, LATE)
    source.set_result(3)
    assert timed.wait() == 3


def test_a_future_that_is_late_times_out_and_its_result_is_too_late():
    source: Future[int] = Future()
    timed = future_timeout(source, SOON)
    with pytest.raises(TimeoutError, match="did not complete within"):
        future_wait(timed, LATE)
    source.set_result(3)
    with pytest.raises(TimeoutError):
        timed.value()


def test_the_error_of_a_future_is_handed_on():
    source: Future[int] = Future()
    timed = future_timeout(source, LATE)
    source.set_exception(ValueError("bad"))
    with pytest.raises(ValueError, match="bad"):
        timed.wait()


def test_waiting_for_a_future_has_a_deadline():
    source: Future[int] = Future()
    with pytest.raises(TimeoutError):
        future_wait(source, SOON)
    source.set_result(5)
    assert future_wait(source, SOON) == 5


def test_a_block_that_takes_too_long_has_its_callback_called():
    called = threading.Event()
    with context_timeout(called.set, SOON):
        assert called.wait(30)


def test_a_block_in_time_is_left_alone():
    called, later = threading.Event(), threading.Event()
    with context_timeout(called.set, timedelta(milliseconds=200)):
        pass
    with context_timeout(later.set, timedelta(milliseconds=300)):
        assert later.wait(30)
    assert not called.is_set()


def test_a_callback_that_raises_does_not_keep_the_other_deadlines_from_being_kept(caplog):
    def bad() -> None:
        raise ValueError("bad callback")

    called = threading.Event()
    with context_timeout(bad, SOON), context_timeout(called.set, 2 * SOON):
        assert called.wait(30)
    assert "a deadline's callback failed" in caplog.text


def test_the_thread_of_the_deadlines_ends_with_the_last_of_them():
    timed = future_timeout(Future(), SOON)
    with pytest.raises(TimeoutError):
        future_wait(timed, LATE)
    keeper = futures._DEADLINES._thread
    if keeper is not None:
        keeper.join(30)
    assert futures._DEADLINES._thread is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stream_that_is_done_in_time_is_left_alone():
    called = threading.Event()
    stream_timeout(called.set, timedelta(milliseconds=100))
    torch.cuda.synchronize()
    assert not called.wait(0.5)  # five times what it had


def test_a_watchdog_timeout_that_is_none_is_refused_at_the_import(monkeypatch):
    monkeypatch.setenv("KEEPSTEP_WATCHDOG_TIMEOUT_SEC", "30s")
    wrong = "KEEPSTEP_WATCHDOG_TIMEOUT_SEC='30s' must be a positive number of seconds, such as 60"
    with pytest.raises(ValueError, match=wrong):
        importlib.reload(futures)


def test_the_watchdog_that_says_it_ends_the_process_ends_it():
    program = (
        "import importlib, threading, torch\nfrom datetime import timedelta\nfrom keepstep import futures\n"
        "context_timeout = importlib.reload(futures).context_timeout\n"  # a fork server may have imported it before
        "never = threading.Event()\n"
        "with context_timeout(never.wait, timedelta(milliseconds=10)):\n    never.wait()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "KEEPSTEP_WATCHDOG_TIMEOUT_SEC": "0.2"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == EXIT_WATCHDOG
    assert "stuck for 0.2 s; ending this process" in done.stderr
