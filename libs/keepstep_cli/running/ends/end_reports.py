"""Tell the lighthouse how the groups of this machine ended; while it does not answer, keep the reports and retry."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections import deque
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from click import ClickException

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.errors import Refused
from keepstep_cli.running.bans import name_at_lighthouse
from keepstep_cli.running.ends.last_lines import (
    MAX_CHARACTERS,
    LastLines,
    cause_of,
    exception_of,
    memory_files,
    oom_kills,
    said_by_keepstep,
)
from keepstep_cli.running.supervisor_events import GroupEnded
from keepstep_mesh.checks.gpu_counters import xid_errors
from keepstep_mesh.config.logging import without_secrets
from keepstep_mesh.exit_codes import EXIT_EVICTED, EXIT_JOB_CLOSED, describe_exit
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.text import listed

MAX_REPORTS = 50
"""Reports that wait for a lighthouse; the oldest are dropped."""
MAX_OTHERS = 8
AGAIN = Backoff(first=0.5, most=15.0)
LAST_SECONDS = 2.0
"""Limit for the reports that are left when the launcher ends."""
LOCKED = "a locked interpreter"
REFUSALS = frozenset({HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN})


class EndReports:
    """``names``: folder in which each group writes its incarnation, to a file with its local name. ``note`` gets
    messages for the operator.
    """

    def __init__(self, lighthouse: Lighthouse, job: str, names: Path, note: Callable[[str, str], None]) -> None:
        self._lighthouse, self._job, self._names, self._note = lighthouse, job, names, note
        self._host = socket.gethostname()
        self._lines: dict[str, dict[int, LastLines]] = {}
        self._name_before: dict[str, int] = {}
        """When the file of the group was written before its last start."""
        self._locked: set[str] = set()
        self._reports: deque[tuple[float, dict[str, Any]]] = deque(maxlen=MAX_REPORTS)
        """With the monotonic time of the end."""
        self._untold: dict[str, str] = {}
        """A sentence about the last end of each group, until the lighthouse has told its verdict."""
        self._more = asyncio.Event()
        self._memory_file, self._oom_kills = _memory()
        self._last_xid = max(xid_errors()[0], default=-1)
        """Number of its record in the kernel log."""

    # ---- facts

    def started(self, group: str) -> None:
        """A group starts."""
        self._lines[group] = {}
        self._locked.discard(group)
        self._name_before[group] = self._written(group)

    def line(self, group: str, rank: int, text: str, *, error: bool) -> None:
        """Note a line of output."""
        self._lines[group].setdefault(rank, LastLines()).add(text, error=error)

    def locked(self, group: str) -> None:
        """The launcher kills a rank whose interpreter is locked."""
        self._locked.add(group)

    def ended(self, end: GroupEnded) -> None:
        """Report the end of a group."""
        rank, code = cause_of(end.ranks)
        lines = self._lines[end.group].get(rank, LastLines())
        others = [f"rank {one} {describe_exit(ended)}" for one, ended in end.ranks if one != rank]
        report = {
            "replica_id": self._name(end.group),
            "rank": rank,
            "code": code,
            "host": self._host,
            "others": listed(others, MAX_OTHERS),
            "error": exception_of(lines.errors) if code == 1 else "",
            "said": said_by_keepstep(lines.errors),
            "stopped_by": LOCKED if end.group in self._locked else end.stopped_by,
            **self._of_machine(),
            "log": lines.text,
        }
        report = {name: without_secrets(one) if isinstance(one, str) else one for name, one in report.items()}
        report["log"] = report["log"][-MAX_CHARACTERS:]  # a text without its secrets may be longer
        self._reports.append((time.monotonic(), report))
        ordered = report["stopped_by"] or code in (EXIT_EVICTED, EXIT_JOB_CLOSED)  # no verdict comes
        self._untold[end.group] = "" if ordered else _sentence(report)
        self._more.set()

    def told(self, group: str) -> None:
        """The lighthouse told why the group ended."""
        self._untold.pop(group, None)

    def _name(self, group: str) -> str:
        """Return the incarnation that has ended; the stable name if it had not come so far as to write that."""
        if self._written(group) == self._name_before[group]:
            return name_at_lighthouse(self._names, group)
        return (self._names / group).read_text(errors="replace")

    def _written(self, group: str) -> int:
        with contextlib.suppress(OSError):
            return (self._names / group).stat().st_mtime_ns
        return 0

    def _of_machine(self) -> dict[str, Any]:
        (where, kills), before = _memory(), self._oom_kills
        xids, gpu = xid_errors()
        new, self._oom_kills = [code for number, code in xids.items() if number > self._last_xid], kills
        self._last_xid = max(self._last_xid, *xids) if xids else self._last_xid
        return {"oom_kills": max(0, kills - before), "memory": where, "xids": " ".join(map(str, new)), "gpu": gpu}

    # ---- sending

    async def run(self) -> None:
        """Send the reports, until cancelled."""
        failures = 0
        while True:
            self._more.clear()
            try:
                await self._send_all()
                failures = 0
                await self._more.wait()
            except ClickException:
                failures += 1
                await asyncio.sleep(AGAIN.seconds(failures))

    async def close(self) -> None:
        """Send what is left, if the lighthouse answers now. Note the ends whose verdict the launcher has not got: its
        own lighthouse ends with it.
        """
        with contextlib.suppress(ClickException, TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await self._send_all()
        for group, sentence in self._untold.items():
            if sentence:
                self._note(group, f"why it ended, as far as this machine knows: {sentence}")

    async def _send_all(self) -> None:
        while self._reports:
            at, report = self._reports[0]
            try:
                await self._lighthouse.post("jobs", self._job, "incidents", **report, seconds_ago=time.monotonic() - at)
            except Refused as error:
                if error.status not in REFUSALS:  # the job begins with its first group
                    raise
                self._note("run", f"the end of {report['replica_id']} is not reported: {error.message}")
            if self._reports and self._reports[0][1] is report:
                self._reports.popleft()


def _sentence(report: dict[str, Any]) -> str:
    kills = f"processes killed because memory ran out: {report['oom_kills']}" if report["oom_kills"] else ""
    xids = f"XID errors: {report['xids']}" if report["xids"] else ""
    first = f"rank {report['rank']} {describe_exit(report['code'])}"
    return "; ".join(filter(None, (first, report["others"], report["error"] or report["said"], kills, xids)))


def _memory() -> tuple[str, int]:
    """Return the file with the number of processes that were killed because memory ran out, and the number."""
    files = []
    with contextlib.suppress(OSError, ValueError):
        files = memory_files(Path("/proc/self/cgroup").read_text())
    for file in files:
        with contextlib.suppress(OSError):
            if (kills := oom_kills(Path(file).read_text())) is not None:
                return file, kills
    return "not there: no cgroup counts them", 0
