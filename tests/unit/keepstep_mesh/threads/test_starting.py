"""A thread that Python refuses to start at the end of the process runs in one that was started before."""

from __future__ import annotations

import threading

import pytest

from keepstep_mesh.threads import starting
from keepstep_mesh.threads.starting import Thread

DEADLINE = 60.0


def refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_a_refused_thread_runs_in_one_of_the_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starting, "RESERVED", 1)
    reserve = starting._Reserve()
    monkeypatch.setattr(starting, "_reserve", reserve)
    starting.reserve_for_exit()
    starting.reserve_for_exit()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    go, ran = threading.Event(), []
    thread = Thread(target=lambda: ran.append(go.wait(DEADLINE)))
    thread.start()
    assert thread.is_alive()
    thread.join(0.0)
    go.set()
    thread.join(DEADLINE)
    assert ran == [True]
    assert not thread.is_alive()
    with pytest.raises(RuntimeError, match="interpreter shutdown"):
        Thread(target=ran.clear).start()
    assert ran
