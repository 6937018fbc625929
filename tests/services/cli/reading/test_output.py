"""Commands without a place for their output: a full disk, a pipe without a reader, no output at all."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from keepstep_mesh.protocol.messages import Drain
from tests.services.cli.scene import DEADLINE, running
from tests.support.services.command import environment, killed_at_the_end, process

UNWRITABLE = 6
KEEPSTEP = (sys.executable, "-m", "keepstep_cli")
PRINTING = [
    ["status"],
    ["status", "--json"],
    ["replicas"],
    ["quorum", "--explain"],
    ["events"],
    ["policy"],
    ["transfers"],
]


@contextmanager
def full() -> Iterator[IO[bytes]]:
    with Path("/dev/full").open("wb") as disk:
        yield disk


@contextmanager
def unread() -> Iterator[IO[bytes]]:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as pipe:
        yield pipe


WHERE = pytest.mark.parametrize(
    ("into", "why"), [(full, "No space left on device"), (unread, "Broken pipe")], ids=["full", "unread"]
)


async def run(*arguments: str, into: IO[bytes]) -> subprocess.CompletedProcess[str]:
    how = {"stdout": into, "stderr": subprocess.PIPE, "text": True, "timeout": DEADLINE, "env": environment()}
    return await asyncio.to_thread(subprocess.run, [*KEEPSTEP, *arguments], check=False, **how)


@WHERE
async def test_a_command_whose_output_cannot_be_written_says_so_and_has_an_exit_code_of_its_own(into, why) -> None:
    async with running("r0") as job:
        for command in PRINTING:
            with into() as nowhere:
                said = await run(*command, *job.at, into=nowhere)
            assert (said.returncode, said.stderr) == (UNWRITABLE, f"Error: the output cannot be written: {why}\n"), (
                command
            )


@WHERE
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["status", "--help"], ["completion", "bash"]], ids=str
)
async def test_so_does_help(into, why, arguments) -> None:
    with into() as nowhere:
        said = await run(*arguments, into=nowhere)
    assert (said.returncode, said.stderr) == (UNWRITABLE, f"Error: the output cannot be written: {why}\n")


@WHERE
async def test_a_service_that_cannot_say_where_it_listens_ends(into, why) -> None:
    with into() as nowhere:
        said = await run("lighthouse", "--bind", "127.0.0.1:0", "--log-level", "error", into=nowhere)
    assert (said.returncode, said.stderr) == (UNWRITABLE, f"Error: the output cannot be written: {why}\n")


async def test_an_order_is_carried_out_anyway() -> None:
    async with running("r0") as job:
        with full() as nowhere:
            said = await run("drain", "r0", "--yes", *job.at, into=nowhere)
        assert said.returncode == UNWRITABLE
        assert (await job.groups[0].push_of(Drain)).reason == "`keepstep drain`"


@pytest.mark.parametrize("command", [["events"], ["events", "--json"], ["transfers", "--json"]], ids=" ".join)
async def test_a_follower_ends_when_nobody_reads_any_more(command) -> None:
    async with running("r0") as job, process(*command, "--follow", *job.at) as follower, asyncio.timeout(DEADLINE):
        await follower.stdout.readline()
        follower._transport.get_pipe_transport(1).close()  # as head -1 does
        while follower.returncode is None:
            await job.groups[0].ask(1, commit_failures=1)  # an event
            await asyncio.sleep(0.05)  # nothing tells that it has read it
        assert follower.returncode == UNWRITABLE
        assert (await follower.stderr.read()).endswith(b"the output cannot be written: Broken pipe\n")


async def test_without_an_output_nothing_is_printed_and_nothing_is_wrong() -> None:
    async with running("r0") as job:
        command = ("sh", "-c", 'exec "$@" >&-', "sh", *KEEPSTEP, "status", *job.at)
        async with (
            killed_at_the_end(*command, stderr=subprocess.PIPE, env=environment()) as closed,
            asyncio.timeout(DEADLINE),
        ):
            assert await closed.communicate() == (b"", b"")
            assert closed.returncode == 0
