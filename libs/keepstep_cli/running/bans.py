"""Ask the lighthouse whether a replica group is banned, and how far its job is."""

from __future__ import annotations

import asyncio
import time
from http import HTTPStatus
from pathlib import Path

from click import ClickException

from keepstep_cli.asking.rest import ASK_AGAIN_SECONDS, Lighthouse
from keepstep_cli.errors import Refused
from keepstep_cli.running.supervisor_events import BanLearned, JobLearned
from keepstep_mesh.protocol.names import name_of

LEAST_SECONDS = 0.5
"""Seconds to wait if a ban is over by the local clock, but the lighthouse still reports it."""


async def ask_ban(lighthouse: Lighthouse, job: str, names: Path, group: str) -> BanLearned:
    """Return the time for which ``group`` is banned, by the name in its file in ``names``, or else its own."""
    name = name_at_lighthouse(names, group)
    return BanLearned(group, await _ban_left(lighthouse, job, name), name)


def name_at_lighthouse(names: Path, group: str) -> str:
    """Return the name of ``group`` in its file in ``names``, or else its own."""
    file = names / group
    return name_of(file.read_text(errors="replace") if file.exists() else "") or group


async def ask_job(lighthouse: Lighthouse, job: str, patience: float, group: str) -> JobLearned:
    """Return the step that ``job`` has reached, and the one at which groups finished it.

    ``patience``: seconds for which this asks a lighthouse again that does not answer, because it may only be starting.
    """
    until = time.monotonic() + patience
    while True:
        try:
            found = await lighthouse.get("jobs", job)
            break
        except ClickException as error:
            if _is_unknown(error):
                return JobLearned(group, 0, 0)
            if time.monotonic() >= until:
                return JobLearned(group, 0, None)
        await asyncio.sleep(ASK_AGAIN_SECONDS)
    return JobLearned(group, int(found.get("finished_step", 0)), found.get("step"))


async def _ban_left(lighthouse: Lighthouse, job: str, name: str) -> float | None:
    """Return the seconds for which ``name`` is banned from ``job``; 0: not banned; None: no lighthouse answers."""
    try:
        bans = (await lighthouse.get("jobs", job))["bans"]
    except ClickException as error:
        return 0.0 if _is_unknown(error) else None
    left = [max(LEAST_SECONDS, ban["until"] - time.time()) for ban in bans if ban["target"] == name]
    return max(left, default=0.0)


def _is_unknown(error: ClickException) -> bool:
    """Whether the lighthouse answered that it does not know the job: no group has connected yet."""
    return isinstance(error, Refused) and error.status == HTTPStatus.NOT_FOUND
