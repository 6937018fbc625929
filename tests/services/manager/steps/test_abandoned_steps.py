"""A source that does not come to hand out its state: who heals from it learns so at once, and why."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from keepstep import Manager
from tests.services.manager.groups import SECOND, manager, together

TIMEOUT = 30 * SECOND
AT_ONCE = 10.0
"""Seconds, on a busy machine; a joiner that gets no message waits for 27."""


class Story:
    """``a`` has committed a step when ``b`` comes; in the step that ``b`` heals in, ``a`` does not come to the end."""

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self.ahead, self.told = threading.Event(), threading.Event()

    def source(self, ends: Callable[[Manager], Any]) -> None:
        with manager(self.lighthouse, "a", {"w": torch.ones(4)}, timeout=TIMEOUT) as m:
            m.start_quorum()
            assert m.should_commit()
            self.ahead.set()
            while True:
                m.start_quorum()
                if m.steps.current().wait_plan().destinations:
                    break
                m.should_commit()
            ends(m)

    def joiner(self, act: Callable[[Manager], Any], *, goes_on: bool = True) -> tuple[float, str, list[float]]:
        """How long its first step took, why it failed, and the weights once it has committed one."""
        assert self.ahead.wait(30)
        state = {"w": torch.zeros(4)}
        try:
            with manager(self.lighthouse, "b", state, timeout=TIMEOUT) as m:
                began = time.monotonic()
                m.start_quorum()
                act(m)
                assert not m.should_commit()
                took, why = time.monotonic() - began, str(m.errored())
                while goes_on:
                    m.start_quorum()
                    reduce(m)
                    if m.should_commit():
                        break
                return took, why, state["w"].tolist()
        finally:
            self.told.set()


def reduce(m: Manager) -> None:
    m.allreduce(torch.ones(1)).wait()


def goes_on(story: Story) -> Callable[[Manager], None]:
    """As after an out-of-memory error in the backward pass, and ``continue``."""

    def act(m: Manager) -> None:
        m.allreduce(torch.ones(1))
        while not story.told.is_set():
            m.start_quorum()
            m.allreduce(torch.ones(1)).wait()
            m.should_commit()

    return act


def fails(m: Manager) -> None:
    """Aborts the collectives of all."""
    reduce(m)
    m.report_error(RuntimeError("out of memory"))


def nothing(_m: Manager) -> None: ...


@pytest.mark.parametrize("act", [nothing, reduce, fails])
def test_a_source_that_begins_another_step_refuses_its_joiner_at_once(lighthouse: str, act: Any) -> None:
    story = Story(lighthouse)
    _, (took, why, weights) = together(lambda: story.source(goes_on(story)), lambda: story.joiner(act))
    assert took < AT_ONCE
    if act is nothing:  # whichever comes first: the refusal, the broken round, or the end of Gloo's connection
        assert re.search(r"a:.* (began another step|did not commit the step)|did not connect: .*closed by peer", why)
    assert weights == [1.0] * 4


def test_a_source_whose_collectives_were_aborted_refuses_its_joiner_too(lighthouse: str) -> None:
    story = Story(lighthouse)

    def abandons(m: Manager) -> None:
        reduce(m)
        while m.errored() is None:  # the joiner failed, and its end of the process group is gone
            reduce(m)
        goes_on(story)(m)

    _, (took, _, weights) = together(lambda: story.source(abandons), lambda: story.joiner(fails))
    assert took < AT_ONCE
    assert weights == [1.0] * 4


def test_a_source_that_cancels_its_step_refuses_its_joiner_at_once(lighthouse: str) -> None:
    story = Story(lighthouse)

    def cancels(m: Manager) -> None:
        m.steps.cancel()
        goes_on(story)(m)

    _, (took, why, weights) = together(lambda: story.source(cancels), lambda: story.joiner(nothing))
    assert took < AT_ONCE
    assert re.search(r"a:.* cancelled the step", why)
    assert weights == [1.0] * 4


def test_a_source_that_ends_in_the_middle_of_a_step_keeps_nobody_waiting(lighthouse: str) -> None:
    story = Story(lighthouse)
    _, (took, why, _) = together(
        lambda: story.source(lambda m: m.shutdown()), lambda: story.joiner(nothing, goes_on=False)
    )
    assert took < AT_ONCE
    # Gloo may still have been connecting, or the heal may not have begun
    assert re.search(r"a:|did not connect|the source of step \d+ is lost: cannot connect", why)


def test_a_source_that_begins_again_before_it_reduced_anything_continues_the_step_and_its_joiner_heals(
    lighthouse: str,
) -> None:
    """As after an out-of-memory error in the forward pass, and ``continue``."""
    ahead, healed = threading.Event(), threading.Event()

    def source() -> int:
        with manager(lighthouse, "a", {"w": torch.ones(4)}, timeout=TIMEOUT) as m:
            m.start_quorum()
            assert m.should_commit()
            ahead.set()
            while True:
                m.start_quorum()
                if destinations := len(m.steps.current().wait_plan().destinations):
                    m.start_quorum()
                    reduce(m)
                assert m.should_commit()
                if destinations:
                    assert healed.wait(30)
                    return m.current_step()

    def joiner() -> tuple[int, list[float]]:
        assert ahead.wait(30)
        state = {"w": torch.zeros(4)}
        with manager(lighthouse, "b", state, timeout=TIMEOUT) as m:
            m.start_quorum()
            reduce(m)
            assert m.should_commit()
            healed.set()
            return m.current_step(), state["w"].tolist()

    step, ended = together(source, joiner)
    assert ended == (step, [1.0] * 4)
