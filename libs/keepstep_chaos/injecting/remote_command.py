"""Run a local command that injects a fault elsewhere. At a deadline, end it and all processes that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence

from keepstep_chaos.vocabulary import Fault

REMOTE_COMMAND_SECONDS = 60.0
"""Longest time of a command, beside that of its fault."""
COMMAND_END_SECONDS = 10.0
"""From a signal to the end of a command; the next signal follows then."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
"""SIGINT first: at SIGTERM, srun has Slurm kill what it started, so that a fault would not be undone."""
MAX_REASON = 300


class CommandError(Exception):
    """The command failed, so the fault may not have hit."""


async def run_command(words: Sequence[str], fault: Fault) -> None:
    """Run a command. It and all commands that it started get signals to end if this is cancelled, or at the deadline.

    Raises:
        CommandError: it failed, or did not end.
        OSError: it cannot be started.
    """
    limit = fault.seconds + REMOTE_COMMAND_SECONDS
    with tempfile.TemporaryFile() as errors:  # a pipe could be held open by what the command left behind
        process = await asyncio.create_subprocess_exec(
            *words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        )
        try:
            async with asyncio.timeout(limit):
                code = await process.wait()
        except TimeoutError:
            raise CommandError(f"{words[0]} did not end within {limit:g} s") from None
        finally:
            if process.returncode is None:
                await _end(process)
        errors.seek(0)
        said = errors.read().decode(errors="replace")
    ended_with_target = fault.kind.name in ("kill", "memory") and code in (-signal.SIGKILL, 128 + signal.SIGKILL)
    if code and not ended_with_target:
        raise CommandError(f"{words[0]} exited with {code}: {_reason(said)}")


async def _end(process: asyncio.subprocess.Process) -> None:
    """Send signals to the command and its children, and wait for their end."""
    for number in ENDING:
        until = time.monotonic() + COMMAND_END_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):  # they have ended, or run as another user
            os.killpg(process.pid, number)
            while time.monotonic() < until:
                await asyncio.sleep(0.02)
                os.killpg(process.pid, 0)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), COMMAND_END_SECONDS)


def _reason(said: str) -> str:
    """Return the error of `keepstep inject`, else the last line: srun and kubectl write lines of their own after it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("Error: ") for line in lines if line.startswith("Error: ")]
    return (errors or lines or ["no message"])[-1][:MAX_REASON]
