"""Signals that are held back while the weights change. Real signals, to this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from keepstep.runtime.held_signals import HeldSignals

Seen = list[int]


@pytest.fixture
def seen() -> Iterator[Seen]:
    """The numbers of the signals that were handled. SIGINT raises KeyboardInterrupt too."""
    handled: Seen = []

    def note(number: int, _: FrameType | None) -> None:
        handled.append(number)
        if number == signal.SIGINT:
            raise KeyboardInterrupt

    numbers = signal.SIGINT, signal.SIGTERM, signal.SIGCHLD
    before = {number: signal.signal(number, note) for number in numbers}
    yield handled
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_signals_are_handled_at_the_end_and_one_that_raises_hides_no_other(seen):
    signals = HeldSignals()
    signals.hold()
    send(signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    assert seen == []
    with pytest.raises(KeyboardInterrupt):
        signals.release()
    assert seen == [signal.SIGINT, signal.SIGTERM, signal.SIGCHLD]


def test_the_handlers_are_those_of_before_afterwards(seen):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)
    signals = HeldSignals()
    signals.hold()
    signals.hold()
    assert signal.getsignal(signal.SIGUSR1) == before[1], "Python does not run the default action of a signal"
    signals.release()
    signals.release()
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGUSR1)) == before
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    assert seen == [signal.SIGINT]


def test_a_second_ctrl_c_is_handled_at_once(seen):
    signals = HeldSignals()
    signals.hold()
    send(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
    signals.release()
    assert seen == [signal.SIGINT], "the first one is not handled again"


def test_a_second_sigterm_is_handled_as_the_second(seen):
    signals = HeldSignals()
    signals.hold()
    send(signal.SIGTERM, signal.SIGTERM)
    assert seen == [signal.SIGTERM] * 2
    signals.release()
    assert seen == [signal.SIGTERM] * 2


def test_a_worker_that_died_is_reported_once_and_at_the_end(seen):
    signals = HeldSignals()
    signals.hold()
    send(signal.SIGCHLD, signal.SIGCHLD)
    assert seen == []
    signals.release()
    assert seen == [signal.SIGCHLD]


def test_an_inner_section_leaves_its_signals_to_the_outer_one(seen):
    outer, inner = HeldSignals(), HeldSignals()
    outer.hold()
    inner.hold()
    send(signal.SIGTERM)
    inner.release()
    assert seen == []
    outer.release()
    assert seen == [signal.SIGTERM]


def test_a_handler_that_was_replaced_in_the_section_stays(seen):
    signals, own = HeldSignals(), []
    signals.hold()
    signal.signal(signal.SIGTERM, lambda *_: own.append(1))
    signals.release()
    send(signal.SIGTERM)
    assert (own, seen) == ([1], [])


def test_a_forked_child_handles_its_signals_at_once(seen):
    signals = HeldSignals()
    signals.hold()
    child = os.fork()
    if child == 0:  # pragma: no cover
        send(signal.SIGTERM)
        os._exit(0 if seen == [signal.SIGTERM] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    signals.release()


def in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_in_another_thread_nothing_is_held_back(seen):
    signals = HeldSignals()
    in_thread(signals.hold)
    assert signals.holding
    send(signal.SIGTERM)
    assert seen == [signal.SIGTERM]
    in_thread(signals.release)
