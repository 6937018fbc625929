"""A `keepstep` command as a process of its own, for tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def process(*arguments: str, **variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """With no KEEPSTEP variables but ``variables``; killed at the end if it still runs."""
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "keepstep_cli", *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if not name.startswith("KEEPSTEP")} | variables,
    )
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.communicate()
