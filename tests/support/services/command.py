"""Processes that tests start, above all `keepstep` commands. They inherit no KEEPSTEP variables."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Queue
from typing import Any

from tests.support.processes.forked import FORKS

START_SECONDS = 60.0


def environment(**variables: str) -> dict[str, str]:
    """The environment of the tests, without KEEPSTEP variables and the terminal width that pytest-xdist sets."""
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("KEEPSTEP") and n not in ("COLUMNS", "LINES")}
    return inherited | variables


@asynccontextmanager
async def killed_at_the_end(*command: str, **how: Any) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a process with piped output; kill it at the end. ``how``: options of ``create_subprocess_exec``."""
    started = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, **how)
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()


@asynccontextmanager
async def process(*arguments: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start a `keepstep` command; kill it at the end if it still runs."""
    command = (sys.executable, "-m", "keepstep_cli", *arguments)
    async with killed_at_the_end(*command, stderr=subprocess.PIPE, env=environment(**variables)) as started:
        yield started


@asynccontextmanager
async def service_process(
    name: str, *flags: str, **variables: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Start ``keepstep <name>`` on a free port; yield the process and its address."""
    async with process(name, "--bind", "127.0.0.1:0", "--log-level", "error", *flags, **variables) as started:
        async with asyncio.timeout(START_SECONDS):
            assert started.stdout is not None
            assert started.stderr is not None
            line = (await started.stdout.readline()).decode()
        assert line.startswith(f"{name} http"), line + (await started.stderr.read()).decode()
        yield started, line.split()[1]


class Command:
    """A `keepstep` command whose stdout and stderr are read as they come. The caller closes it.

    ``prefix``: a program that starts the command. With ``FORKS`` in ``variables``, the ranks of `keepstep run` are
    forked in each start, so `--cold` spares the template the same imports.
    """

    def __init__(
        self, folder: Path, *arguments: str, deadline: float, prefix: tuple[str, ...] = (), **variables: str
    ) -> None:
        if arguments[0] == "run" and variables.get(FORKS) and "--cold" not in arguments:
            arguments = ("run", "--cold", *arguments[1:])
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "keepstep_cli", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(**variables),
        )
        self.lines: list[str] = []
        """Lines read so far by ``wait_for``, ``seen`` and ``wait``."""
        self._deadline = deadline
        self._queue: Queue[str | None] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._queue.put(line.rstrip("\n"))
        self._queue.put(None)

    def wait_for(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Return the match of the n-th line from here on that matches."""
        while (line := self._queue.get(timeout=self._deadline)) is not None:
            self.lines.append(line)
            if match := re.search(pattern, line):
                times -= 1
                if times == 0:
                    return match
        raise AssertionError(f"no line like {pattern!r} in:\n" + "\n".join(self.lines))

    def seen(self, pattern: str) -> None:
        """Wait for a line that matches, also an earlier one: lines of different processes come in any order."""
        if not any(re.search(pattern, line) for line in self.lines):
            self.wait_for(pattern)

    def wait(self) -> int:
        """Read all remaining lines into ``lines`` and return the exit code."""
        while (line := self._queue.get(timeout=self._deadline)) is not None:
            self.lines.append(line)
        return self.process.wait(self._deadline)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(self._deadline)
        self._reader.join(self._deadline)
