"""A `keepstep` command as a process, what it said, and a lighthouse with groups for it to talk to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from keepstep_lighthouse.app import Lighthouse
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tokens import Tokens
from tests.support.services.asking_group import Group
from tests.support.services.command import process
from tests.support.services.lighthouse_driver import lighthouse

DEADLINE = 60.0
WORKER, ADMIN = "worker-token-of-the-test", "admin-token-of-the-test"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


async def keepstep(*arguments: str, **variables: str) -> Said:
    async with process(*arguments, **variables) as started, asyncio.timeout(DEADLINE):
        out, err = await started.communicate()
        assert started.returncode is not None
        return Said(started.returncode, out.decode(), err.decode())


@dataclass
class Job:
    lighthouse: Lighthouse
    groups: list[Group]

    @property
    def at(self) -> tuple[str, str]:
        return "--lighthouse", self.lighthouse.address


@asynccontextmanager
async def running(*names: str, tokens: Tokens | None = None) -> AsyncIterator[Job]:
    """A lighthouse and groups of these names under its first quorum."""
    policy, token = Policy(min_replicas=max(1, len(names))), tokens.worker if tokens else None
    async with lighthouse(policy=policy, tokens=tokens or Tokens()) as one, contextlib.AsyncExitStack() as stack:
        groups = [
            await stack.enter_async_context(Group(one.address, name=name, job="default", token=token)) for name in names
        ]
        await asyncio.gather(*(group.ask(1) for group in groups))
        yield Job(one, groups)


async def line_of(stream: asyncio.StreamReader | None, text: str) -> str:
    """The next line that has ``text``."""
    assert stream is not None
    async with asyncio.timeout(DEADLINE):
        while line := (await stream.readline()).decode():
            if text in line:
                return line
    raise AssertionError(f"no line with {text!r}")


async def first_line(started: asyncio.subprocess.Process) -> str:
    assert started.stdout is not None
    async with asyncio.timeout(DEADLINE):
        return (await started.stdout.readline()).decode().strip()
