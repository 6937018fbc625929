"""Decide when to restart and when to kill the processes of a job, and when it is over. Pure: no I/O, no clock.

A *group* is a set of ranks that live and die together. The rules:

1.  A rank that exits with 0 is done. A group whose ranks are all done is finished and does not restart.
2.  A rank that ends in any other way fails its group: the other ranks get SIGTERM and, after ``grace`` seconds,
    SIGKILL. When the last rank has ended, the whole group restarts.
3.  A group that ran for ``ran_well`` seconds restarts at once. After a shorter life it waits for a delay of
    ``backoff``, which grows with each one in a row, and is drawn from its upper half, so that groups that die together
    again and again do not restart together.
4.  After ``max_restarts`` restarts the supervisor gives a group up; at once if one of its ranks can never start, or
    ended with a code of ``ENDS_THE_SAME``. The other groups go on, and may finish without it.
5.  A *service* (the embedded lighthouse) restarts after every exit code, without a limit. The supervisor does not wait
    for it, and ends it when every group is finished or given up.
6.  A group with a rank that ended with ``EXIT_EVICTED`` does not restart while its name is banned. The core asks when
    the last rank has ended (``AskBan``), when the ban should be over, and in between every ``ban_check`` seconds,
    because a ban may be lifted. Without an answer, the group counts as banned.
7.  A restart that an operator orders (``OrderRestart``) ends a group that runs, with SIGTERM first, and starts it at
    once, whatever its exit codes and its phase. After a ``Stop`` it has no effect.
8.  When a group fails after another one finished, the core asks how far the job is (``AskJob``). If it is finished,
    the group is given up: alone it would train the whole job again. Without an answer it restarts, and the lighthouse
    refuses it if the job is finished.
9.  When a group ended ``script_errors`` times in a row with a code of ``SCRIPT_ERRORS``, the core asks the same. If the
    job has committed no step, the group is given up: its script has an error. Without an answer it restarts.
10. A group with a rank that ended with ``EXIT_PREFLIGHT`` failed the checks of its machine. It waits ``refused_pause``
    before its restart, and twice as long each time in a row, up to ``refused_most``.
11. When the last rank of a group has ended, and the group has not finished, ``GroupEnded`` reports it.
12. The first ``Stop`` sends SIGTERM to every group, SIGKILL after ``grace``, and ends all restarts. Services end last,
    so that groups can still announce that they leave. The second ``Stop`` sends SIGKILL to everything at once.
    SIGPIPE (no process reads the output) is no second one, and the signal after it is the first: Ctrl-C in a shell
    pipe also ends the reader.

``handle`` takes an event (``supervisor_events``), the monotonic time in seconds, and a number drawn from [0, 1). It
returns the actions in order. ``deadline`` is the time of the next ``Tick``. The rest of this package carries the
actions out.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from keepstep_cli.running.supervisor_events import (
    RESTARTED,
    Action,
    AskBan,
    AskJob,
    BanLearned,
    Begin,
    Event,
    GroupEnded,
    GroupSpec,
    JobLearned,
    Note,
    OrderRestart,
    RankExited,
    Restarts,
    SignalGroup,
    StartGroup,
    Stop,
    Tick,
)
from keepstep_mesh.exit_codes import (
    ENDS_THE_SAME,
    EXIT_EVICTED,
    EXIT_JOB_CLOSED,
    EXIT_PREFLIGHT,
    EXIT_SCRIPT_FAILS,
    describe_exit,
)

SCRIPT_ERRORS = frozenset({1, 2})
"""Exit codes of Python after an exception, and of a script that refuses its arguments."""


class Phase(enum.Enum):
    RUNNING = "running"
    ENDING = "ending"
    """Signalled to end; some ranks still run."""
    BANNED = "banned"
    """Evicted, and banned as far as known."""
    ASKING = "asking"
    """Failed after another group finished: the job may be finished."""
    WAITING = "waiting"
    """Waiting for its restart."""
    FINISHED = "finished"
    GIVEN_UP = "given up"
    STOPPED = "stopped"


WAITS = frozenset({Phase.WAITING, Phase.BANNED, Phase.ASKING})
OVER = frozenset({Phase.FINISHED, Phase.GIVEN_UP, Phase.STOPPED})


@dataclass(slots=True)
class _Group:
    spec: GroupSpec
    phase: Phase = Phase.WAITING
    alive: set[int] = field(default_factory=set)
    ended: list[tuple[int, int]] = field(default_factory=list)
    """Rank and exit code of those that have ended in this run."""
    failed: bool = False
    evicted: bool = False
    hopeless: int = 0
    """Code of a rank after which another try would end the same; 0: none."""
    script_failed: bool = False
    """A rank ended with a code of ``SCRIPT_ERRORS``."""
    script_errors: int = 0
    """Number of consecutive runs that ended so."""
    refused: bool = False
    """A rank ended with ``EXIT_PREFLIGHT``."""
    refusals: int = 0
    """Number of consecutive runs that ended so."""
    restart_ordered: bool = False
    ban_noted: str = ""
    """The last message about its ban."""
    restarts: int = 0
    """Number of restarts."""
    short_lives: int = 0
    """Number of consecutive runs that ended before ``ran_well``."""
    started_at: float = 0.0
    deadline: float | None = None
    """ENDING: time of SIGKILL; WAITING: of the restart; BANNED: of the next question."""


class Supervisor:
    """The state of one job's processes."""

    def __init__(self, groups: Sequence[GroupSpec], restarts: Restarts) -> None:
        if len({spec.name for spec in groups}) != len(groups):
            raise ValueError("two groups have the same name")
        self._restarts = restarts
        self._groups = {spec.name: _Group(spec) for spec in groups}
        self._stops = 0
        self._unread = False
        """No process reads the output."""
        self._stop_signal: int = signal.SIGTERM
        self._closing = False
        """All groups have ended, and the services are ending."""

    def phase(self, group: str) -> Phase:
        return self._groups[group].phase

    def restarts(self, group: str) -> int:
        return self._groups[group].restarts

    @property
    def _stopping(self) -> bool:
        return self._unread or self._stops > 0

    def deadline(self) -> float | None:
        """Return the monotonic time of the next ``Tick``."""
        return min((one.deadline for one in self._groups.values() if one.deadline is not None), default=None)

    def exit_code(self) -> int | None:
        """Return the exit code of the job; None while a process runs or will run.

        0 all groups finished, 1 a group was given up, 128 + n stopped by signal n. If another try of a group would end
        the same: its code, and of several groups the highest. A group that came back after the others had finished
        does not count beside one that finished here.
        """
        phases = [one.phase for one in self._groups.values()]
        if not all(phase in OVER for phase in phases):
            return None
        if self._stopping:
            return 128 + self._stop_signal
        codes = {one.hopeless or 1 for one in self._groups.values() if one.phase is Phase.GIVEN_UP}
        if Phase.FINISHED in (one.phase for one in self._groups.values() if not one.spec.service):
            codes.discard(EXIT_JOB_CLOSED)
        return max(codes, default=0)

    def handle(self, event: Event, now: float, chance: float = 0.0) -> list[Action]:
        actions: list[Action] = []
        match event:
            case Begin():
                for group in self._groups.values():
                    self._start(group, now, actions)
            case RankExited():
                self._exited(self._groups[event.group], event, now, chance, actions)
            case BanLearned():
                self._learn_ban(self._groups[event.group], event, now, chance, actions)
            case JobLearned():
                self._learn_job(self._groups[event.group], event, now, chance, actions)
            case Stop():
                self._stop(event, now, actions)
            case OrderRestart():
                self._order_restart(self._groups[event.group], now, actions)
            case Tick():
                for group in self._groups.values():
                    self._tick(group, now, actions)
        if not self._closing and all(one.spec.service or one.phase in OVER for one in self._groups.values()):
            self._closing = True
            for group in self._groups.values():
                self._end(group, now, actions)
        return actions

    def validate(self) -> None:
        """Check all invariants; raises AssertionError."""
        for group in self._groups.values():
            name = group.spec.name
            assert bool(group.alive) == (group.phase in {Phase.RUNNING, Phase.ENDING}), f"{name}: phase against ranks"
            timed = group.phase in {Phase.ENDING, Phase.WAITING, Phase.BANNED}
            assert timed or group.deadline is None, f"{name}: a deadline and nothing to wait for"
            assert group.spec.service or group.restarts <= self._restarts.max_restarts, f"{name}: too many restarts"
            waits = group.phase in WAITS
            assert not (self._stopping and waits), f"{name}: would be started after a stop"

    # ---- one group

    def _start(self, group: _Group, now: float, actions: list[Action]) -> None:
        group.phase, group.failed, group.deadline = Phase.RUNNING, False, None
        group.evicted, group.ban_noted, group.script_failed, group.refused = False, "", False, False
        group.alive, group.ended = set(range(group.spec.ranks)), []
        group.started_at = now
        actions.append(StartGroup(group.spec.name, group.restarts))

    def _exited(self, group: _Group, event: RankExited, now: float, chance: float, actions: list[Action]) -> None:
        group.alive.discard(event.rank)
        group.ended.append((event.rank, event.code))
        group.evicted |= event.code == EXIT_EVICTED
        group.refused |= event.code == EXIT_PREFLIGHT
        if event.hopeless or event.code in ENDS_THE_SAME:
            group.hopeless = max(group.hopeless, event.code)
        group.script_failed |= event.code in SCRIPT_ERRORS
        failed = event.code != 0 or group.spec.service
        if failed and group.phase is Phase.RUNNING:
            group.failed = True
            others = f", ending the other {len(group.alive)}" if group.alive else ""
            actions.append(Note(group.spec.name, f"rank {event.rank} {describe_exit(event.code)}{others}"))
            self._signal_end(group, now, actions)
        if group.alive:
            return
        group.deadline = None
        self._tell_end(group, actions)
        group.script_errors = group.script_errors + 1 if group.script_failed else 0
        group.refusals = group.refusals + 1 if group.refused else 0
        if self._stopping or self._closing:
            group.phase = Phase.STOPPED
        elif group.restart_ordered:
            self._start_as_ordered(group, now, actions)
        elif not group.failed:
            group.phase = Phase.FINISHED
            actions.append(Note(group.spec.name, "ended: exit code 0"))
        elif group.hopeless and not group.spec.service:
            group.phase = Phase.GIVEN_UP
            actions.append(Note(group.spec.name, "given up: another try would end the same"))
        elif group.evicted and not group.spec.service:
            group.phase = Phase.BANNED
            actions.append(AskBan(group.spec.name))
        elif not group.spec.service and (
            group.script_errors >= self._restarts.script_errors
            or any(one.phase is Phase.FINISHED for one in self._groups.values())
        ):
            group.phase = Phase.ASKING
            actions.append(AskJob(group.spec.name))
        else:
            self._plan_restart(group, now, chance, actions)

    def _tell_end(self, group: _Group, actions: list[Action]) -> None:
        """Report the end of a group, unless it has finished."""
        stopped_by = ""
        if not group.failed and group.restart_ordered:
            stopped_by = RESTARTED
        elif not group.failed and self._stopping:
            stopped_by = signal.Signals(self._stop_signal).name
        if not group.spec.service and (group.failed or stopped_by):
            actions.append(GroupEnded(group.spec.name, tuple(group.ended), stopped_by))

    def _order_restart(self, group: _Group, now: float, actions: list[Action]) -> None:
        name = group.spec.name
        if self._stopping or self._closing:
            actions.append(Note(name, "not restarted: the job is ending"))
        elif group.alive:
            group.restart_ordered = True
            actions.append(Note(name, "restart ordered: ending its ranks"))
            if group.phase is Phase.RUNNING:
                self._signal_end(group, now, actions)
        else:
            self._start_as_ordered(group, now, actions)

    def _start_as_ordered(self, group: _Group, now: float, actions: list[Action]) -> None:
        """Start without a pause. The restart counts, but no limit forbids it."""
        group.restart_ordered = False
        group.hopeless = group.short_lives = group.script_errors = group.refusals = 0
        group.restarts = min(group.restarts + 1, self._restarts.max_restarts)
        self._start(group, now, actions)

    def _learn_job(self, group: _Group, learned: JobLearned, now: float, chance: float, actions: list[Action]) -> None:
        if group.phase is not Phase.ASKING:
            return
        if learned.finished:
            sentence = f"not started again: other groups finished the job at step {learned.finished}"
        elif learned.step == 0 and group.script_errors >= self._restarts.script_errors:
            group.hopeless = EXIT_SCRIPT_FAILS
            sentence = (
                f"given up: its script ended with an error {group.script_errors} times in a row, and the job has not "
                f"committed a step; correct the error above, then start the job again"
            )
        else:
            self._plan_restart(group, now, chance, actions)
            return
        group.phase = Phase.GIVEN_UP
        actions.append(Note(group.spec.name, sentence))

    def _learn_ban(self, group: _Group, learned: BanLearned, now: float, chance: float, actions: list[Action]) -> None:
        if group.phase is not Phase.BANNED:
            return
        seconds_left = learned.seconds_left
        if seconds_left == 0:
            self._plan_restart(group, now, chance, actions)
            return
        name, check = group.spec.name, self._restarts.ban_check
        group.deadline = now + (check if seconds_left is None else min(seconds_left, check))
        known = "unknown" if seconds_left is None else "banned"
        if group.ban_noted != known:
            group.ban_noted = known
            until = "no lighthouse says whether it is banned; asking on"
            if seconds_left is not None:
                until = f"banned for {seconds_left:.0f} s more; `keepstep readmit {learned.name or name}` ends that"
            actions.append(Note(name, f"evicted, not started again: {until}"))

    def _plan_restart(self, group: _Group, now: float, chance: float, actions: list[Action]) -> None:
        limits = self._restarts
        if not group.spec.service and group.restarts >= limits.max_restarts:
            group.phase = Phase.GIVEN_UP
            group.hopeless = EXIT_PREFLIGHT if group.refused else group.hopeless
            sentence = (
                f"given up after {group.restarts} restarts" if group.restarts else "given up, no restarts allowed"
            )
            actions.append(Note(group.spec.name, sentence))
            return
        group.short_lives = 0 if now - group.started_at >= limits.ran_well else group.short_lives + 1
        delay = limits.backoff.seconds(group.short_lives, chance) if group.short_lives else 0.0
        if group.refused:
            delay = min(limits.refused_pause * 2.0 ** (group.refusals - 1), limits.refused_most)
            actions.append(Note(group.spec.name, f"refused by the checks of its machine, {group.refusals} in a row"))
        group.restarts += 1
        group.phase, group.deadline = Phase.WAITING, now + delay
        of = "" if group.spec.service else f" of {limits.max_restarts}"
        actions.append(Note(group.spec.name, f"restart {group.restarts}{of} {f'in {delay:.2f} s' if delay else 'now'}"))

    def _tick(self, group: _Group, now: float, actions: list[Action]) -> None:
        if group.deadline is None or now < group.deadline:
            return
        if group.phase is Phase.WAITING:
            self._start(group, now, actions)
        elif group.phase is Phase.BANNED:
            group.deadline = None
            actions.append(AskBan(group.spec.name))
        else:
            group.deadline = None
            actions.append(Note(group.spec.name, f"still there {self._restarts.grace:g} s after SIGTERM: killed"))
            actions.append(SignalGroup(group.spec.name, signal.SIGKILL))

    # ---- ending

    def _stop(self, event: Stop, now: float, actions: list[Action]) -> None:
        ends_already, ordered = self._stopping, event.signum != signal.SIGPIPE
        self._stops += ordered
        self._unread |= not ordered
        if self._stops > 1:
            if ordered:
                self._kill_all(actions)
            return
        if ordered or not ends_already:
            self._stop_signal = event.signum
        if event.signum == signal.SIGINT:
            actions.append(Note("run", "ending; Ctrl-C again kills at once"))
        if not ends_already:
            for group in self._groups.values():
                if not group.spec.service or group.phase is Phase.WAITING:
                    self._end(group, now, actions)

    def _kill_all(self, actions: list[Action]) -> None:
        for group in self._groups.values():
            if group.alive:
                group.deadline = None
                actions.append(SignalGroup(group.spec.name, signal.SIGKILL))

    def _end(self, group: _Group, now: float, actions: list[Action]) -> None:
        if group.phase in WAITS:
            group.phase, group.deadline = Phase.STOPPED, None
        elif group.phase is Phase.RUNNING:
            self._signal_end(group, now, actions)

    def _signal_end(self, group: _Group, now: float, actions: list[Action]) -> None:
        if group.alive:
            group.phase, group.deadline = Phase.ENDING, now + self._restarts.grace
            actions.append(SignalGroup(group.spec.name, signal.SIGTERM))
