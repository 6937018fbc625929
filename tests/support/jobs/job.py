"""A real job for tests: a lighthouse process and replica groups of ``trainer.py``.

Nothing here sleeps to wait: every wait is on a line that a trainer printed, with a deadline that a busy machine keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, Self

from keepstep_chaos.histories.history import Report
from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import summary_lines, violation_lines
from keepstep_mesh.net.http import client_session, raise_for_problem
from tests.support.network.namespaces import LOOPBACK, Host
from tests.support.network.ports import free_port

DEADLINE = 90.0


TRAINER = Path(__file__).with_name("trainer.py")
SCRIPTS = Path(__file__).with_name("scripts.py")
"""In place of ``TRAINER`` for a group with SCRIPTS in its environment."""
SHARDED = Path(__file__).with_name("sharded_trainer.py")
"""In place of ``TRAINER`` for a group with TRAINER_SHARDED in its environment."""
ONE_COPY = Path(__file__).with_name("one_copy_trainer.py")
"""In place of ``TRAINER`` for a group with TRAINER_ONE_COPY in its environment."""
ELASTIC = Path(__file__).with_name("elastic_trainer.py")
"""In place of ``TRAINER`` for a group with TRAINER_ELASTIC in its environment."""
HANGING = Path(__file__).with_name("hanging_trainer.py")
"""In place of ``TRAINER`` for a group with TRAINER_HANG in its environment."""


class Rank:
    """One process of a group, or the launcher of all of them.

    ``launcher``: its command; empty: the process runs the trainer itself.
    """

    def __init__(
        self,
        environment: dict[str, str],
        heard: Callable[[str], Awaitable[None]],
        host: Host,
        launcher: Sequence[str] = (),
    ) -> None:
        others = {
            "SCRIPTS": SCRIPTS,
            "TRAINER_HANG": HANGING,
            "TRAINER_SHARDED": SHARDED,
            "TRAINER_ELASTIC": ELASTIC,
            "TRAINER_ONE_COPY": ONE_COPY,
        }
        script = next((script for name, script in others.items() if name in environment), TRAINER)
        command = [*host.command, *(launcher or (sys.executable, str(script)))]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        self.pid = self.process.pid
        self._heard = heard
        self.reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Read until the process and all heirs of its output have ended; then collect its exit code."""
        loop = asyncio.get_running_loop()
        stream = asyncio.StreamReader(limit=2**20)
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), self.process.stdout)
        try:
            async for line in stream:
                await self._heard(line.decode(errors="replace").rstrip())
        finally:
            transport.close()
        await loop.run_in_executor(None, self.process.wait, DEADLINE)
        await self._heard("")

    def signal(self, number: int) -> None:
        if not self.reader.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    @property
    def exit_code(self) -> int | None:
        return self.process.returncode if self.reader.done() else None


@dataclass
class Group:
    name: str
    ranks: list[Rank] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    """Printed lines that are no events, shown when a test fails."""
    _commits: dict[int, dict[int, str]] = field(default_factory=dict)

    def heard(self, event: dict[str, Any]) -> None:
        self.lines.append(event)
        if event["event"] == "committed":
            self._commits.setdefault(event["pid"], {})[event["step"]] = event["digest"]

    def has(self, event: str, pid: int) -> bool:
        """Return whether this process has printed ``event``."""
        return any((line["event"], line["pid"]) == (event, pid) for line in self.lines)

    def kill(self, rank: int | None = None, number: int = signal.SIGKILL) -> None:
        for one in self.ranks if rank is None else [self.ranks[rank]]:
            one.signal(number)

    async def gone(self) -> None:
        """Wait for the end of its processes and forget them."""
        for one in self.ranks:
            one.signal(signal.SIGCONT)
            await one.reader
        self.ranks = []

    def committed(self, rank: int = 0) -> dict[int, str]:
        """Map each step that a rank of the newest incarnation committed to its digest, in ascending order."""
        return self._commits.setdefault(self.ranks[rank].pid, {})

    def step(self) -> int:
        return next(reversed(self.committed()), 0)

    def steps_after(self, step: int) -> set[int]:
        """Steps after ``step`` that the newest incarnation committed."""
        return set(takewhile(lambda one: one > step, reversed(self.committed())))

    def longest_gap(self, since: float) -> float:
        """Longest time in seconds between two successive commits, from a second before ``since`` (Unix time) on."""
        recent = takewhile(lambda event: event["t"] > since - 1, reversed(self.lines))
        times = [event["t"] for event in recent if event["event"] == "committed"]
        return max((later - earlier for later, earlier in pairwise(times)), default=0.0)

    async def exit_codes(self) -> list[int]:
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*(one.reader for one in self.ranks))
        return [one.exit_code if one.exit_code is not None else -1 for one in self.ranks]


def discarded(*groups: Group) -> list[dict[str, Any]]:
    """The "discarded" events of these groups."""
    return [event for group in groups for event in group.lines if event["event"] == "discarded"]


def lost_steps(since: float, *groups: Group) -> list[int]:
    """The steps that these groups discarded after ``since`` (Unix time), and took again.

    A group does not take a step again that another one had committed before the loss of a member: it heals.
    """
    events = [(group, event) for group in groups for event in discarded(group) if event["t"] > since]
    return sorted({event["step"] + 1 for group, event in events if event["step"] + 1 in group.committed()})


class Job:
    """Use as an async context manager. ``policy``: flags of the lighthouse.

    At its end the logs of the lighthouse and of all trainers are checked: ``keepstep check-history``.
    """

    def __init__(self, *flags: str, min_replicas: int = 1, address: str | None = None, bind: str = "127.0.0.1") -> None:
        self._flags = flags
        self._min_replicas = min_replicas
        self.port = free_port()
        self.address = address or f"http://{bind}:{self.port}"
        self._bind = bind
        self.groups: dict[str, Group] = {}
        self._changed = asyncio.Condition()
        self._directory = tempfile.TemporaryDirectory(prefix="keepstep-test-")
        self.directory = Path(self._directory.name)
        self.logs = self.directory / "logs"
        self.logs.mkdir()
        self.lighthouse: asyncio.subprocess.Process | None = None
        self.history: Report | None = None
        """The report of ``check_history``, at the end."""

    async def __aenter__(self) -> Self:
        await self.start_lighthouse()
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        for group in self.groups.values():
            group.kill()
        for group in self.groups.values():
            await group.gone()
        await self.stop_lighthouse(signal.SIGTERM)
        try:
            self.check_history()
        except Exception as history:
            if error is None:
                raise
            error.add_note(f"and its history: {history}")  # report what failed first
        finally:
            self._directory.cleanup()

    def check_history(self) -> None:
        """Fail on a violation, and on a history without records."""
        report = self.history = check_files([self.logs])
        told = "\n".join(summary_lines(report) + violation_lines(report))
        assert report.fine, f"{told}\n{self.report()}"
        assert report.event_logs, told
        assert not any(group.lines for group in self.groups.values()) or report.step_logs, told

    @property
    def rest_address(self) -> str:
        """Address of a lighthouse for requests over HTTP."""
        return self.address

    def host_of(self, _group: str) -> Host:
        """The host on which the processes of a group run."""
        return LOOPBACK

    def host_of_rank(self, group: str, _rank: int) -> Host:
        """The host on which this rank of a group runs."""
        return self.host_of(group)

    async def start_lighthouse(self) -> None:
        log = (self.directory / "lighthouse.log").open("ab")
        with log:
            self.lighthouse = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "keepstep_cli", "lighthouse", "--bind", f"{self._bind}:{self.port}",
                "--store", f"sqlite:///{self.directory}/lighthouse.db", "--min-replicas", str(self._min_replicas),
                "--event-log", str(self.logs / "events.jsonl"), *self._flags, stdout=log, stderr=log,
            )  # fmt: skip

    async def stop_lighthouse(self, number: int = signal.SIGKILL) -> None:
        if self.lighthouse is not None and self.lighthouse.returncode is None:
            os.kill(self.lighthouse.pid, number)  # send_signal polls, and takes the exit code from asyncio's waiter
            async with asyncio.timeout(DEADLINE):
                await self.lighthouse.wait()

    async def start(
        self,
        name: str,
        ranks: int = 1,
        lighthouse: str = "",
        *,
        backwards: bool = False,
        launcher: Sequence[str] = (),
        **environment: str,
    ) -> Group:
        """Start a group. A second call with a name restarts that group.

        ``backwards``: start the highest rank first, and each rank when the one before it has printed "started".
        ``launcher``: as in ``Rank``.
        """
        group = self.groups.setdefault(name, Group(name))
        await group.gone()
        restart = sum(e["event"] == "started" and e["rank"] == 0 for e in group.lines)
        port = free_port()
        for rank in reversed(range(ranks)) if backwards else range(ranks):
            variables = {
                **os.environ,
                "KEEPSTEP_LIGHTHOUSE": lighthouse or self.address,
                "REPLICA_GROUP_ID": name,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                **({"LOCAL_RANK": str(rank)} if ranks > 1 else {}),
                "MASTER_ADDR": self.host_of_rank(name, 0).address,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_RESTART_COUNT": str(restart),
                "PYTHONUNBUFFERED": "1",
                "KEEPSTEP_STEP_LOG": str(self.logs / f"{name}.jsonl"),
                **environment,
            }
            one = Rank(variables, partial(self._heard, group), self.host_of_rank(name, rank), launcher)
            group.ranks.insert(0 if backwards else rank, one)
            if backwards:
                await self.until(partial(group.has, "started", one.pid), f"rank {rank} of {name} starts")
        return group

    def assert_all_live(self) -> None:
        """Fail if a process of a group has ended."""
        codes = [one.exit_code for group in self.groups.values() for one in group.ranks]
        assert set(codes) == {None}, f"{codes}\n{self.report()}"

    async def order(self, method: str, path: str, **body: Any) -> Any:
        """Call the REST interface of the lighthouse below /v1/jobs/default."""
        url = f"{self.rest_address}/v1/jobs/default{path}"
        async with client_session(timeout=DEADLINE) as http, http.request(method, url, json=body or None) as answer:
            await raise_for_problem(answer)
            return await answer.json()

    async def _heard(self, group: Group, text: str) -> None:
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        async with self._changed:
            if isinstance(line, dict) and "event" in line and "pid" in line:
                group.heard(line)
            else:
                group.output.append(text)
            self._changed.notify_all()

    async def until(self, condition: Callable[[], Any], what: str, seconds: float = DEADLINE) -> Any:
        """Wait until ``condition`` is true; it is checked after each line of a trainer."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                return await self._changed.wait_for(condition)
        except TimeoutError:
            raise AssertionError(f"not seen within {seconds:g} s: {what}\n{self.report()}") from None

    def report(self) -> str:
        parts = []
        for group in self.groups.values():
            codes = [one.exit_code for one in group.ranks]
            events = [json.dumps(e) for e in group.lines[-6:]]
            parts.append("\n".join([f"--- {group.name} (exit {codes})", *events, *group.output[-25:]]))
        log = self.directory / "lighthouse.log"
        tail = log.read_text().splitlines()[-25:] if log.exists() else []
        return "\n".join([*parts, "--- lighthouse", *tail])

    async def advance(self, *groups: Group, steps: int = 5, seconds: float = DEADLINE) -> None:
        """Wait until these groups (default: all) have committed ``steps`` steps together from now on."""
        chosen = groups or tuple(self.groups.values())
        start = max(group.step() for group in self.groups.values())

        def common() -> int:
            return len(set.intersection(*(group.steps_after(start) for group in chosen)))

        names = [group.name for group in chosen]
        await self.until(lambda: common() >= steps, f"{names}: {steps} steps together after step {start}", seconds)

    def assert_identical(self, *groups: Group) -> int:
        """Check that groups which committed a step in the same quorum hold the same weights after it.

        Return the number of compared steps. ``check_history`` finds steps that two quorums counted.
        """
        compared = 0
        seen: dict[tuple[int, int], tuple[str, str]] = {}
        for group in groups or tuple(self.groups.values()):
            for event in group.lines:
                if event["event"] != "committed" or event["quorum_id"] is None:  # it has yet to heal for the first time
                    continue
                first = seen.setdefault((event["step"], event["quorum_id"]), (event["digest"], group.name))
                assert first[0] == event["digest"], (
                    f"step {event['step']}: {group.name} and {first[1]} hold different weights\n{self.report()}"
                )
                compared += 1
        return compared - len(seen)
