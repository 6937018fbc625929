"""Decide why a group ended, from what its launcher and the lighthouse know. Pure.

The first rule that applies decides:

1.  An end that was ordered is no incident: Ctrl-C, ``keepstep restart``, an eviction, a drain, a job that is closed.
2.  A failed check before joining, and an XID error that no program can cause, blame the *machine*.
3.  A hang is a fault of the *script*.
4.  A kill that the cgroup counts as out of memory, and an error of an allocation, mean *out of memory*.
5.  A SIGTERM that no order sent, and a notice that the script passed on, mean *preemption*.
6.  A group that was silent and came back as the same process was cut off by the *network*, and so was one whose process
    ended by itself after the silence. If it does not come back, its *machine* is down, unless another group of that
    machine lives.
7.  An exception is a fault of the *script*, unless ``ERRORS`` knows better. Other exit codes are the script's, unless
    keepstep gave them.
8.  A crash (such as SIGSEGV) is a fault of the script, unless it comes again and again on one machine of several.
9.  All else is *unknown*; the evidence says what is known.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from keepstep_lighthouse.quorum.presence.departures import DRAINED, EVICTED, FAILED, HUNG, SILENT, STOPPED
from keepstep_mesh.checks.findings import BAD_XIDS
from keepstep_mesh.exit_codes import (
    EXIT_COLLECTIVES_DIFFER,
    EXIT_EVICTED,
    EXIT_GROUP_FAILED,
    EXIT_HUNG,
    EXIT_JOB_CLOSED,
    EXIT_MISMATCH,
    EXIT_PREFLIGHT,
    EXIT_SCRIPT_FAILS,
    EXIT_START_REFUSED,
    EXIT_STATE_MISMATCH,
    EXIT_WATCHDOG,
    describe_exit,
)
from keepstep_mesh.protocol.membership import OWN

MAX_EVIDENCE = 400
"""Characters of a sentence."""
CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP})
LEAST_CRASHES = 2
"""Earlier crashes on a machine after which the next one is a fault of the machine."""
OF_SCRIPT = frozenset(
    {EXIT_STATE_MISMATCH, EXIT_COLLECTIVES_DIFFER, EXIT_MISMATCH, EXIT_START_REFUSED, EXIT_SCRIPT_FAILS}
)
"""Exit codes of keepstep for faults of the script, or of its settings."""
OWN_CODES = frozenset({EXIT_STATE_MISMATCH, EXIT_WATCHDOG, *range(EXIT_GROUP_FAILED, EXIT_PREFLIGHT + 1)})
"""Exit codes that keepstep gives."""
IN_STEP = "ended in the middle of a step with "
"""Part of the reason of a group whose script raised within a step."""
LOCKED, RESTARTED = "a locked interpreter", "an order to restart"
"""Values of ``Report.stopped_by``, in addition to names of signals."""


class Verdict(enum.Enum):
    SCRIPT = "script"
    MACHINE = "machine"
    NETWORK = "network"
    MEMORY = "out of memory"
    PREEMPTION = "preemption"
    UNKNOWN = "unknown"
    ORDERED = "ordered"
    """No incident: it takes the place of one that was made before the order was known."""


ERRORS: tuple[tuple[re.Pattern[str], Verdict, str], ...] = (
    (re.compile(r"MemoryError|OutOfMemoryError|out of memory|Cannot allocate memory"), Verdict.MEMORY, ""),
    (
        re.compile(r"\[Errno (5|28|30)\]|uncorrectable ECC"),
        Verdict.MACHINE,
        "a disk or a GPU of its machine does not work",
    ),
    (
        re.compile(r"^(\w+\.)*(Connection\w*Error|gaierror)\b"),
        Verdict.NETWORK,
        "another process or machine could not be reached",
    ),
)
"""Errors whose cause is outside of the script."""


@dataclass(frozen=True, slots=True)
class Report:
    """The end of a group, as its launcher saw it."""

    replica_id: str
    """Incarnation, or stable name of a group that has not connected."""
    rank: int
    """The rank that ended first, by itself."""
    code: int
    """Its exit code; negative: the signal that killed it."""
    seconds_ago: float = 0.0
    host: str = ""
    others: str = ""
    """How the other ranks ended, a sentence."""
    error: str = ""
    """Type and first line of the exception that ended it, with ``file:line function``; empty: none was printed."""
    said: str = ""
    """The last sentence of keepstep in its output."""
    stopped_by: str = ""
    """Why the launcher ended it: a signal that the launcher got, ``LOCKED``, ``RESTARTED``; empty: it did not."""
    oom_kills: int = 0
    """Processes that the kernel killed in its cgroup, because memory ran out, since it started."""
    memory: str = ""
    """The file with that count, or why it is not there."""
    xids: str = ""
    """XID errors of the kernel log since it started, with blanks between."""
    gpu: str = ""
    """Whether the kernel log could be read."""
    log: str = ""
    """The last lines of its output."""

    @property
    def signal(self) -> int:
        """The signal that killed it; also if a shell reported it, as 128 + n. 0: none."""
        return -self.code if self.code < 0 else self.code - 128 if 128 < self.code <= 128 + signal.SIGRTMAX else 0

    @property
    def sentence(self) -> str:
        return f"rank {self.rank} {describe_exit(self.code)}"


@dataclass(frozen=True, slots=True)
class Loss:
    """How the lighthouse lost the group."""

    how: str
    """``how`` of the event ``lost``, ``cause`` of the event ``left``."""
    reason: str


@dataclass(frozen=True, slots=True)
class Around:
    """Other facts about the group, its machine, and the other machines."""

    came_back: bool = False
    """The same process has connected again."""
    host_lives: bool = False
    """Another group of its machine is connected."""
    crashes_here: int = 0
    """Earlier crashes on its machine."""
    crashes_elsewhere: int = 0
    other_hosts: bool = False
    """The job has groups on other machines."""


@dataclass(frozen=True, slots=True)
class Judged:
    verdict: Verdict
    evidence: tuple[str, ...]


def judge(report: Report | None, loss: Loss | None, around: Around) -> Judged | None:
    """Return why a group ended; None: its end was ordered.

    Args:
        report: None: no launcher has reported the end.
        loss: None: the lighthouse did not know the group.
        around: the rest.
    """
    if _is_ordered(report, loss):
        return None
    verdict, why = next(found for rule in RULES if (found := rule(report, loss, around)) is not None)
    end = "" if report is None else ": ".join(filter(None, (report.sentence, report.others)))
    error = "" if report is None else report.error
    kept = dict.fromkeys(one[:MAX_EVIDENCE] for one in (end, error, *why) if one)
    return Judged(verdict, tuple(kept))


def parted(cause: str, reason: str) -> Judged:
    """Return why a group is kept out (event ``parted``)."""
    known = _known_error(reason.partition(": ")[2])
    if cause == "cut":
        return Judged(Verdict.NETWORK, (reason,))
    if known is not None:
        return Judged(known[0], (reason, known[1]) if known[1] else (reason,))
    if cause == OWN:
        return Judged(Verdict.MACHINE, (reason, "the other groups run the same script, and do not fail"))
    return Judged(Verdict.UNKNOWN, (reason,))


Found = tuple[Verdict, tuple[str, ...]] | None
Rule = Callable[[Report | None, Loss | None, Around], Found]


def _is_ordered(report: Report | None, loss: Loss | None) -> bool:
    if loss is not None and loss.how == EVICTED:
        return True
    if report is None or (loss is not None and loss.how == HUNG):
        return False
    stopped = report.stopped_by not in ("", "SIGTERM", LOCKED)
    return stopped or report.code in (EXIT_EVICTED, EXIT_JOB_CLOSED)


def _machine(report: Report | None, _loss: Loss | None, _around: Around) -> Found:
    if report is None:
        return None
    bad = [int(one) for one in report.xids.split() if one.isdecimal() and int(one) in BAD_XIDS]
    if bad:
        return Verdict.MACHINE, tuple(f"XID {one}: {BAD_XIDS[one]}" for one in dict.fromkeys(bad))
    if report.code == EXIT_PREFLIGHT:
        return Verdict.MACHINE, (report.said or "it failed a check before it joined",)
    return None


def _hang(report: Report | None, loss: Loss | None, _around: Around) -> Found:
    said = report.said if report is not None else ""
    if loss is not None and loss.how == HUNG:
        return Verdict.SCRIPT, (loss.reason,)
    if report is not None and report.code == EXIT_HUNG:
        return Verdict.SCRIPT, (said,)
    if report is not None and report.stopped_by == LOCKED:
        return Verdict.SCRIPT, (f"the launcher killed it, because of {LOCKED}", "its log has the stacks")
    return None


def _memory(report: Report | None, _loss: Loss | None, _around: Around) -> Found:
    if report is None or not report.oom_kills or report.stopped_by:
        return None
    killed = report.signal == signal.SIGKILL or "killed by signal" in report.error
    times = "a process" if report.oom_kills == 1 else f"{report.oom_kills} processes"
    if not killed:
        return None
    return Verdict.MEMORY, (f"the kernel killed {times} because memory ran out ({report.memory})",)


def _preemption(report: Report | None, loss: Loss | None, _around: Around) -> Found:
    if report is not None and report.stopped_by == "SIGTERM":
        return Verdict.PREEMPTION, ("SIGTERM reached its launcher",)
    if loss is not None and loss.how == DRAINED:
        return Verdict.PREEMPTION, (f"it left after a notice: {loss.reason}",)
    terminated = report is not None and report.signal == signal.SIGTERM
    if terminated or (loss is not None and loss.how == STOPPED):
        return Verdict.PREEMPTION, ("SIGTERM reached it, and neither keepstep nor its launcher had sent it",)
    return None


def _network(report: Report | None, loss: Loss | None, around: Around) -> Found:
    if loss is None or loss.how != SILENT:
        return None
    if around.came_back:
        return Verdict.NETWORK, (loss.reason, "the same process has connected again")
    if report is not None and report.code > 0:
        return Verdict.NETWORK, (loss.reason, "its process lived on, and ended by itself later")
    if report is not None:
        return None
    if around.host_lives:
        return Verdict.UNKNOWN, (loss.reason, "another group of its machine is connected: its process may be stopped")
    return Verdict.MACHINE, (loss.reason, "neither it nor its launcher was heard again: its machine or link is down")


def _script(report: Report | None, loss: Loss | None, _around: Around) -> Found:
    error = report.error if report is not None else ""
    told = loss.reason if loss is not None and (loss.how == FAILED or IN_STEP in loss.reason) else ""
    if (known := _known_error(error or told.partition(" with ")[2])) is not None:
        return known[0], (known[1], "" if error else told)
    if error:
        return Verdict.SCRIPT, ()
    if report is not None and report.code in OF_SCRIPT:
        return Verdict.SCRIPT, (report.said,)
    if told:
        return Verdict.SCRIPT, (told,)
    if report is not None and report.code > 0 and not report.signal and report.code not in OWN_CODES:
        return Verdict.SCRIPT, ("it printed no exception: the script chose this exit code",)
    return None


def _crash(report: Report | None, _loss: Loss | None, around: Around) -> Found:
    if report is None or report.signal not in CRASHES:
        return None
    if around.crashes_here >= LEAST_CRASHES and around.other_hosts and not around.crashes_elsewhere:
        again = f"its machine had {around.crashes_here} crashes before, and no other machine had one"
        return Verdict.MACHINE, (again,)
    return Verdict.SCRIPT, ("native code of the script or of a library crashed",)


def _unknown(report: Report | None, loss: Loss | None, _around: Around) -> Found:
    reason = "" if loss is None else loss.reason
    if report is None:
        return Verdict.UNKNOWN, (reason, "no launcher told how its process ended")
    if report.signal == signal.SIGKILL and not report.oom_kills:
        return Verdict.UNKNOWN, (
            f"no launcher sent that; kills because memory ran out: {report.memory or 'not known'}",
        )
    return Verdict.UNKNOWN, (report.said, reason)


RULES: tuple[Rule, ...] = (_machine, _hang, _memory, _preemption, _network, _script, _crash, _unknown)


def _known_error(error: str) -> tuple[Verdict, str] | None:
    return next(((verdict, why) for pattern, verdict, why in ERRORS if pattern.search(error)), None)
