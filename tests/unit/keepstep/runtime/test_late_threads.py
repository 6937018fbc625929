"""The end of a process on Python 3.12, which then starts no thread."""

from __future__ import annotations

import threading

import pytest

from keepstep.process_group.torch_backends import disposal
from keepstep.runtime.late_threads import start_or_run
from keepstep_mesh.threads import starting


def refuse(_thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_the_work_of_a_thread_that_cannot_start_is_done_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    started = threading.Thread(target=lambda: done.append(threading.current_thread().name), name="own")
    assert start_or_run(started)
    started.join()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(starting, "_reserve", starting._Reserve())  # a Manager of another test may have filled it
    assert not start_or_run(threading.Thread(target=lambda: done.append(threading.current_thread().name)))
    assert done == ["own", threading.current_thread().name]

    backend = [None]
    disposal.dispose(backend)
    assert backend == []
    assert not disposal._disposals, "it would be joined at the end"
