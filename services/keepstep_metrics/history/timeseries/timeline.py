"""The state of a group over time: two arrays, of the start of each state and of the states. Pure.

Every moment between the first mark and now has exactly one state. A later report about an earlier time replaces the
state of that time only.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from enum import Enum
from itertools import pairwise
from typing import Any


class State(Enum):
    TRAINING = "training"
    """In a committed step, or in the current one."""
    WAITING_QUORUM = "waiting_quorum"
    """Waits for the quorum, or has not begun."""
    HEALING = "healing"
    RETRYING = "retrying"
    """In a discarded step, or between the failure of a step and the end of its retry."""
    LOST = "lost"
    """Dead or evicted."""
    DRAINING = "draining"
    """Asked to leave."""
    GONE = "gone"
    """Left gracefully. This time does not count."""
    STANDBY = "standby"
    """Stands by as a spare. This time does not count."""
    WAITING_SLOW_GROUP = "waiting_slow_group"
    """Waited for the quorum, which then formed as before: another group came late. Only the end of a wait tells."""


STATES = tuple(State)
LIVING: tuple[State, ...] = tuple(state for state in STATES if state not in (State.GONE, State.STANDBY))
"""States whose time counts."""
NUMBER = {state: number for number, state in enumerate(STATES)}
"""Stored in dumps: a new state comes last."""
NUMBERS_BEFORE = bytes.maketrans(bytes([NUMBER[State.WAITING_SLOW_GROUP]]), bytes([NUMBER[State.WAITING_QUORUM]]))
"""From the numbers of states to those that the release before knows."""
MAX_MARKS = 4000
"""Per group; the oldest are forgotten first."""


class Timeline:
    def __init__(self) -> None:
        self.starts = array("d")
        self.states = array("B")

    def __bool__(self) -> bool:
        return bool(self.starts)

    @property
    def state(self) -> State:
        return STATES[self.states[-1]] if self.states else State.GONE

    @property
    def since(self) -> float:
        return self.starts[-1] if self.starts else 0.0

    def mark(self, t: float, state: State) -> None:
        """Set the state from ``t`` on. A mark before the last one is ignored."""
        if self.starts and t < self.starts[-1]:
            return
        self._assign(t, t, state)

    def fill(self, begin: float, end: float, state: State) -> None:
        """Set the state from ``begin`` to ``end``; also after ``end``, if no later state is known."""
        if end > begin:
            self._assign(begin, end, state)

    def _assign(self, begin: float, end: float, state: State) -> None:
        starts, states, number = self.starts, self.states, NUMBER[state]
        if not starts or begin >= starts[-1]:
            if not starts or states[-1] != number:
                if starts and begin == starts[-1]:
                    starts.pop()
                    states.pop()
                if not states or states[-1] != number:
                    starts.append(begin)
                    states.append(number)
                self._forget()
            return
        first, last = bisect_left(starts, begin), bisect_left(starts, end)
        after = states[last - 1] if last else number
        open_end = last == len(starts)
        new_starts, new_states = array("d"), array("B")
        if not first or states[first - 1] != number:
            new_starts.append(begin)
            new_states.append(number)
        if not open_end and after != number and starts[last] != end:
            new_starts.append(end)
            new_states.append(after)
        following = last
        if following < len(starts) and (new_states[-1] if new_states else number) == states[following]:
            following += 1
        starts[first:following] = new_starts
        states[first:following] = new_states
        self._forget()

    def _forget(self) -> None:
        if len(self.starts) > MAX_MARKS + MAX_MARKS // 8:
            del self.starts[:-MAX_MARKS], self.states[:-MAX_MARKS]

    def forget_before(self, t: float) -> None:
        """Forget the states that ended before ``t``."""
        if (gone := bisect_right(self.starts, t) - 1) > 0:
            del self.starts[:gone], self.states[:gone]

    def forget_after(self, t: float) -> None:
        """Forget what happened after ``t``. The last state holds from ``t`` on."""
        state, first = self.state, bisect_right(self.starts, t)
        if first < len(self.starts):
            del self.starts[first:], self.states[first:]
            self.mark(t, state)

    def spans(self, since: float, until: float) -> list[tuple[float, float, State]]:
        """Return (begin, end, state) between the two times, without ``GONE``."""
        if not self.starts or until <= since:
            return []
        first = max(0, bisect_right(self.starts, since) - 1)
        last = bisect_left(self.starts, until)
        edges = [*self.starts[first:last], until]
        return [
            (max(begin, since), end, STATES[number])
            for (begin, end), number in zip(pairwise(edges), self.states[first:last], strict=True)
            if end > max(begin, since) and STATES[number] is not State.GONE
        ]

    def seconds(self, since: float, until: float) -> dict[State, float]:
        found = dict.fromkeys(LIVING, 0.0)
        for begin, end, state in self.spans(since, until):
            if state is not State.STANDBY:
                found[state] += end - begin
        return found

    def dump(self) -> tuple[bytes, bytes, bytes]:
        """Return the starts, the states for the release before, which reads these two, and the states."""
        states = self.states.tobytes()
        return self.starts.tobytes(), states.translate(NUMBERS_BEFORE), states

    @classmethod
    def load(cls, dumped: Any) -> Timeline:
        one = cls()
        one.starts.frombytes(dumped[0])
        one.states.frombytes(dumped[-1])
        return one


def merged(spans: list[tuple[float, float, State]], shortest: float) -> list[tuple[float, float, State]]:
    """Merge adjacent spans that are shorter than ``shortest`` seconds (a pixel), for drawing.

    A merged span gets its most frequent state, but ``training`` only if it has no other state: a retry of a second
    must be visible in a picture of a day. Neighbours with the same state become one span; gaps stay.
    """
    result: list[tuple[float, float, State]] = []
    short: list[tuple[float, float, State]] = []

    def add(begin: float, end: float, state: State) -> None:
        if result and result[-1][2] is state and result[-1][1] == begin:
            result[-1] = (result[-1][0], end, state)
        else:
            result.append((begin, end, state))

    def close() -> None:
        if short:
            share: dict[State, float] = {}
            for begin, end, state in short:
                share[state] = share.get(state, 0.0) + end - begin
            unusual = {state: seconds for state, seconds in share.items() if state is not State.TRAINING} or share
            add(short[0][0], short[-1][1], max(unusual, key=lambda state: unusual[state]))
            short.clear()

    for begin, end, state in spans:
        if short and (short[-1][1] != begin or end - begin >= shortest):
            close()
        if end - begin >= shortest:
            add(begin, end, state)
            continue
        short.append((begin, end, state))
        if end - short[0][0] >= shortest:
            close()
    close()
    return result
