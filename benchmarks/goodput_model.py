"""Useful samples of a job under failures: counted from the commits of a run, and computed from measured parts. Pure.

*Goodput* is the share of the samples of an undisturbed job that the final model contains. Steps that are lost or
repeated do not count, nor do the samples of a group that is away.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

GROUPS = 3


@dataclass(frozen=True)
class Commit:
    """A step that a group committed."""

    time: float
    step: int
    participants: int


@dataclass(frozen=True)
class Kill:
    time: float
    group: int


def kills(mean: float, seconds: float, seed: int) -> list[Kill]:
    """Return kills at random times, each of a random group, in a window.

    The times between them are exponential, and scaled so that the window has exactly ``seconds / mean`` kills; the last
    one comes a random time before its end.
    """
    draw = random.Random(seed)
    count = round(seconds / mean)
    gaps = [draw.expovariate(1.0) for _ in range(count + 1)]
    times = [seconds * one / sum(gaps) for one in accumulate(gaps[:-1])]
    return [Kill(one, draw.randrange(GROUPS)) for one in times]


def random_kills(mean: float, seed: int, groups: int = GROUPS) -> Iterator[Kill]:
    """Yield kills without end."""
    draw, time = random.Random(seed), 0.0
    while True:
        time += draw.expovariate(1.0 / mean)
        yield Kill(time, draw.randrange(groups))


# ---- counted


def kept(commits: Iterable[Commit]) -> list[Commit]:
    """Return one commit of each step that the final model contains, by time. A repeated step counts once.

    A commit was lost if a later one has its step, or an earlier step.
    """
    found: list[Commit] = []
    for one in sorted(commits, key=lambda one: (one.time, one.step), reverse=True):
        if not found or one.step < found[-1].step:
            found.append(one)
    return found[::-1]


def useful(commits: Sequence[Commit], begin: float, end: float) -> float:
    """Return the steps with all groups that a window is worth. A step counts evenly over the time since the last one.

    Args:
        commits: those that ``kept`` returned.
        begin: of the window, after the first commit.
        end: of the window. After the last commit nothing counts.
    """
    times = [one.time for one in commits]
    worth = list(accumulate(one.participants / GROUPS for one in commits))

    def until(moment: float) -> float:
        at = bisect_right(times, moment)
        if at in {0, len(times)}:
            return worth[at - 1] if at else 0.0
        share = (moment - times[at - 1]) / (times[at] - times[at - 1])
        return worth[at - 1] + share * (worth[at] - worth[at - 1])

    return until(end) - until(begin)


@dataclass(frozen=True)
class Cost:
    """Seconds that one kill costs.

    Attributes:
        pause: what it adds to the steps of the groups that are left, until the killed one takes part again.
        away: from the kill until the killed group begins a step.
    """

    pause: float
    away: float


def cost(commits: Sequence[Commit], killed: float, back: float, step: float) -> Cost | None:
    """Return what a kill cost; None: the job does not tell.

    Args:
        commits: those that ``kept`` returned.
        killed: time of the kill.
        back: time of the first commit of the killed group after it.
        step: seconds of an undisturbed step.
    """
    times = [one.time for one in commits]
    first, last = bisect_right(times, killed), bisect_right(times, back)
    if not first or last <= first:
        return None
    took = times[last - 1] - times[first - 1]
    return Cost(max(0.0, took - (last - first) * step), max(0.0, back - step - killed))


# ---- computed


def of_replicas(costs: Sequence[Cost], step: float, mean: float, seconds: float, seed: int = 0) -> float:
    """Simulate a job whose groups come back one by one. Return its goodput.

    A kill adds its pause to the step in which it falls. Its group takes part again in the first step that begins after
    its way back. If no group is left, all wait for the first one.

    Args:
        costs: measured ones, of which each kill draws one.
        step: seconds of an undisturbed step.
        mean: seconds between two kills in the job.
        seconds: length of the simulation.
        seed: of the kills.
    """
    draw, coming = random.Random(seed + 1), random_kills(mean, seed)
    back, now, done, kill = [0.0] * GROUPS, 0.0, 0.0, next(coming)
    while now < seconds:
        now = max(now, min(back))
        taking, end = {group for group in range(GROUPS) if back[group] <= now}, now + step
        while kill.time < end:
            one = draw.choice(costs)
            if kill.group in taking:
                end += one.pause
            taking.discard(kill.group)
            back[kill.group] = kill.time + one.away
            kill = next(coming)
        done += step * len(taking) / GROUPS
        now = end
    return done / now


def of_restarts(
    downs: Sequence[float], step: float, save: float, every: int, mean: float, seconds: float, seed: int = 0
) -> float:
    """Simulate a job that restarts as a whole from its newest checkpoint. Return its goodput.

    Args:
        downs: seconds from a kill to the beginning of the next step; each kill draws one.
        step: seconds of an undisturbed step, without a save.
        save: seconds of a save.
        every: steps between two saves.
        mean: seconds between two kills in the job.
        seconds: length of the simulation.
        seed: of the kills.

    Returns:
        The share of the steps of the same job, with its saves, without kills.
    """
    draw, coming = random.Random(seed + 1), random_kills(mean, seed)
    now, at, saved, kill = 0.0, 0, 0, next(coming)
    while now < seconds:
        end = now + step + (save if (at + 1) % every == 0 else 0.0)
        if kill.time < end:
            now, at = kill.time + draw.choice(downs), saved
            while kill.time < now:  # a kill of a job that restarts begins its restart again
                kill = next(coming)
                if kill.time < now:
                    now = kill.time + draw.choice(downs)
            continue
        now, at = end, at + 1
        saved = at if at % every == 0 else saved
    return at * (step + save / every) / now


def best_every(save: float, step: float, mean: float) -> int:
    """Return the steps between two saves that lose least, at least one: sqrt(2 * save * mean) seconds (Young, Daly)."""
    return max(1, round(math.sqrt(2 * save * mean) / step))


def median_step(commits: Sequence[Commit]) -> float:
    """Return the median of the seconds between two commits."""
    gaps = sorted(after.time - before.time for before, after in pairwise(commits))
    return gaps[len(gaps) // 2]
