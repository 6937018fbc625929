"""Start processes, forward their output, and report their ends: the shell around ``supervisor``.

An event arrives, the core decides, the shell acts, in this order. Before the core learns of the end of a group, all its
processes have ended and their sessions are killed, so a new incarnation never meets an old one.
"""

from __future__ import annotations

import asyncio
import errno
import random
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from keepstep_cli.running import ranks
from keepstep_cli.running.console.output import read_lines
from keepstep_cli.running.ends.end_reports import EndReports
from keepstep_cli.running.silent_ranks import LOCKED_SECONDS, TURNS, SilentRanks
from keepstep_cli.running.supervisor import Supervisor
from keepstep_cli.running.supervisor_events import (
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
from keepstep_cli.running.warm.warm_starts import WarmStarts
from keepstep_mesh.threads.dumped_stacks import dumped_stacks

OUTPUT_GRACE_SECONDS = 2.0
"""Maximum wait for the last output of a dead rank; after that, another process holds its pipe."""
CANNOT_START = 127
HOPELESS = frozenset((errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOEXEC))
"""Errors of starting a program that no retry can fix."""


@dataclass(frozen=True, slots=True)
class Program:
    """A group for the shell: the command and environments of its ranks."""

    spec: GroupSpec
    command: tuple[str, ...]
    environments: Callable[[int], list[dict[str, str]]]
    """One environment for each rank, given how often the group was restarted."""


class Audience(Protocol):
    """Receiver of output and messages."""

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:
        """Receive a line of a rank; ``error``: from its standard error."""

    def note(self, group: str, sentence: str) -> None:
        """Receive a message of the supervisor."""


class Launcher:
    """Run one job. Call ``run`` once, and ``stop`` and ``kill`` from the same loop at any time.

    ``ask_ban`` returns how long the name of a group is banned; by default no name is. ``ask_job`` returns how far
    the job is; by default nothing is known. Ranks write to the folder ``imports`` what they have imported, and later
    ones start with that and with ``preload`` done; by default all starts are cold. A rank whose interpreter is locked
    for ``silent_after`` seconds is killed; 0: none is. ``ends`` tells the lighthouse how groups ended.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        restarts: Restarts,
        audience: Audience,
        ask_ban: Callable[[str], Awaitable[BanLearned]] | None = None,
        ask_job: Callable[[str], Awaitable[JobLearned]] | None = None,
        imports: Path | None = None,
        preload: Sequence[str] = (),
        silent_after: float = LOCKED_SECONDS,
        ends: EndReports | None = None,
    ) -> None:
        self._programs = {one.spec.name: one for one in programs}
        self.core = Supervisor([one.spec for one in programs], restarts)
        self._audience = audience
        self._bans = ask_ban
        self._job = ask_job
        self._silent_after = silent_after
        self._ends = ends
        self.warm = None
        if imports is not None:
            groups = [one for one in programs if not one.spec.service]
            environments = partial(_all_environments, groups)
            self.warm = WarmStarts(groups[0].command, environments, imports, preload, partial(self.note, "run"))
        self._questions: set[asyncio.Task[None]] = set()
        self._processes: dict[str, dict[int, ranks.RankProcess]] = {name: {} for name in self._programs}
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._watchers: asyncio.TaskGroup

    def stop(self, signum: int = signal.SIGTERM) -> None:
        """End all groups cleanly on the first call, kill them on the second."""
        self._events.put_nowait(Stop(signum))

    def restart(self, group: str) -> None:
        """Restart a group: one that runs ends first."""
        self._events.put_nowait(OrderRestart(group))

    def kill(self, group: str, signum: int = signal.SIGKILL) -> None:
        """Signal the ranks of a group as a failure would, without notice to the supervisor."""
        for process in self._processes[group].values():
            process.send(signum)

    def pids(self) -> dict[str, list[int]]:
        """Return the processes that run, by group or service."""
        return {name: [one.pid for one in processes.values()] for name, processes in self._processes.items()}

    async def run(self) -> int:
        """Run the job and return its exit code (``Supervisor.exit_code``). Leaves no process behind."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._look)
        try:
            async with asyncio.TaskGroup() as self._watchers:
                try:
                    if self.warm is not None:
                        self._watchers.create_task(self.warm.run(), name="warm starts")
                    if self._silent_after:
                        self._ask(self._kill_silent_ranks(), "silent ranks")
                    self._handle(Begin())
                    while (code := self.core.exit_code()) is None:
                        self._handle(await self._next_event())
                    return code
                finally:
                    for name in self._processes:
                        self.kill(name)
                    for question in self._questions:
                        question.cancel()
                    if self.warm is not None:
                        self.warm.close()
        finally:
            loop.remove_signal_handler(signal.SIGCHLD)

    async def _next_event(self) -> Event:
        deadline = self.core.deadline()
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - time.monotonic())):
                return await self._events.get()
        except TimeoutError:
            return Tick()

    def _handle(self, event: Event) -> None:
        for action in self.core.handle(event, time.monotonic(), random.random()):  # noqa: S311 - jitter
            match action:
                case StartGroup():
                    self._start(self._programs[action.group], action.restart)
                case SignalGroup():
                    self.kill(action.group, action.signum)
                case AskBan():
                    self._ask(self._ask_ban(action.group), f"ban of {action.group}")
                case AskJob():
                    self._ask(self._ask_job(action.group), f"job of {action.group}")
                case GroupEnded():
                    if self._ends is not None:
                        self._ends.ended(action)
                case Note():
                    self.note(action.group, action.sentence)

    def _ask(self, question: Coroutine[Any, Any, None], name: str) -> None:
        task = self._watchers.create_task(question, name=name)
        self._questions.add(task)
        task.add_done_callback(self._questions.discard)

    async def _ask_job(self, name: str) -> None:
        self._events.put_nowait(JobLearned(name, 0) if self._job is None else await self._job(name))

    async def _ask_ban(self, name: str) -> None:
        self._events.put_nowait(BanLearned(name, 0.0) if self._bans is None else await self._bans(name))

    async def _kill_silent_ranks(self) -> None:
        silent = SilentRanks()
        while True:
            await asyncio.sleep(self._silent_after / TURNS)
            found = {
                one.pid: (name, rank, one)
                for name, processes in self._processes.items()
                for rank, one in processes.items()
                if not self._programs[name].spec.service
            }
            for pid in silent.turn(found):
                name, rank, process = found[pid]
                for text in dumped_stacks(pid).splitlines():
                    self._line(name, rank, text, error=True)
                self.note(
                    name,
                    f"rank {rank} has run no Python code for {self._silent_after:g} s, because a thread does not let "
                    f"go of the interpreter: killed, see its stacks above",
                )
                if self._ends is not None:
                    self._ends.locked(name)
                process.send(signal.SIGKILL)

    def _start(self, program: Program, restart: int) -> None:
        name = program.spec.name
        warm = 0
        if self._ends is not None:
            self._ends.started(name)
        environments: list[dict[str, str]] = []
        for rank in range(program.spec.ranks):
            try:
                environments = environments or program.environments(restart)  # it looks for a free port
                environment = environments[rank]
                child = self._started_warm(program, environment)
                warm += child is not None
                process = ranks.RankProcess(child or ranks.started(program.command, environment))
            except OSError as error:
                self.note(name, f"rank {rank} cannot be started: {error}")
                self._events.put_nowait(RankExited(name, rank, CANNOT_START, hopeless=error.errno in HOPELESS))
                continue
            self._processes[name][rank] = process
            self._watchers.create_task(self._watch(name, rank, process), name=f"watch {name}/{rank}")
        if self._processes[name] and not program.spec.service:
            pids = " ".join(str(one.pid) for one in self._processes[name].values())
            how = ", warm" if warm == len(self._processes[name]) else ""
            self.note(name, f"started{' again' if restart else ''}, pid {pids}{how}")

    def _started_warm(self, program: Program, environment: Mapping[str, str]) -> ranks.Child | None:
        if self.warm is None or program.spec.service:
            return None
        return self.warm.start(program.command, environment)

    async def _watch(self, name: str, rank: int, process: ranks.RankProcess) -> None:
        """Run one rank from its start to its end."""
        output, errors = await process.output()
        readers = [
            asyncio.create_task(read_lines(output, partial(self._line, name, rank, error=False))),
            asyncio.create_task(read_lines(errors, partial(self._line, name, rank, error=True))),
        ]
        code = await process.wait()
        _, late = await asyncio.wait(readers, timeout=OUTPUT_GRACE_SECONDS)
        for reader in late:
            reader.cancel()
        await asyncio.wait(readers)
        process.close()
        for reader in readers:
            if not reader.cancelled():
                reader.result()
        del self._processes[name][rank]
        self._events.put_nowait(RankExited(name, rank, code))

    def _look(self) -> None:
        for processes in self._processes.values():
            for process in processes.values():
                process.look()
        if self.warm is not None:
            self.warm.look({one.pid for processes in self._processes.values() for one in processes.values()})

    def _line(self, name: str, rank: int, text: str, *, error: bool) -> None:
        if self._ends is not None:
            self._ends.line(name, rank, text, error=error)
        try:
            self._audience.line(name, rank, text, error=error)
        except BrokenPipeError:
            self._nobody_listens()

    def note(self, name: str, sentence: str) -> None:
        """Pass a message on to the audience."""
        try:
            self._audience.note(name, sentence)
        except BrokenPipeError:
            self._nobody_listens()

    def _nobody_listens(self) -> None:
        """End the job, as any filter does when its reader has closed the pipe. The stream discards further output."""
        self.stop(signal.SIGPIPE)


@contextmanager
def stop_on_signals(launcher: Launcher) -> Iterator[None]:
    """Turn SIGINT, SIGTERM, and, unless it is ignored as under ``nohup``, SIGHUP into stops inside the block."""
    loop = asyncio.get_running_loop()
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signals = (signal.SIGINT, signal.SIGTERM, *(() if ignored else (signal.SIGHUP,)))
    for signum in signals:
        loop.add_signal_handler(signum, launcher.stop, signum)
    try:
        yield
    finally:
        for signum in signals:
            loop.remove_signal_handler(signum)


def _all_environments(groups: Sequence[Program]) -> list[dict[str, str]]:
    return [one for group in groups for restart in (0, 1) for one in group.environments(restart)]


def replica_programs(job: ranks.JobSpec, base: Mapping[str, str]) -> list[Program]:
    """Return the replica groups of ``job``: ``r0``, ``r1`` ..."""

    def program(group: int) -> Program:
        def environments(restart: int) -> list[dict[str, str]]:
            port = ranks.free_port()
            return [
                ranks.rank_environment(job, group, rank, restart=restart, master_port=port, base=base)
                for rank in range(job.nproc_per_replica)
            ]

        name = ranks.group_name(job, group)
        return Program(GroupSpec(name, job.nproc_per_replica), job.command, environments)

    return [program(group) for group in range(job.replicas + job.spares)]
