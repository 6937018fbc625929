"""Ask the lighthouse whether a replica group is banned, or its job finished."""

from __future__ import annotations

import time
from http import HTTPStatus
from pathlib import Path

from click import ClickException

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.errors import Refused
from keepstep_cli.running.supervisor_events import BanLearned

LEAST_SECONDS = 0.5
"""Seconds to wait if a ban is over by the local clock, but the lighthouse still reports it."""


async def ask_ban(lighthouse: Lighthouse, job: str, names: Path, group: str) -> BanLearned:
    """Return the time for which ``group`` is banned, by the name in its file in ``names``, or else its own."""
    name = name_at_lighthouse(names, group)
    return BanLearned(group, await _ban_left(lighthouse, job, name), name)


def name_at_lighthouse(names: Path, group: str) -> str:
    """Return the name of ``group`` in its file in ``names``, or else its own."""
    file = names / group
    return (file.read_text(errors="replace") if file.exists() else "") or group


async def ask_finished(lighthouse: Lighthouse, job: str) -> int:
    """Return the step at which groups finished ``job``; 0: the job is not finished, or no lighthouse answers."""
    try:
        return int((await lighthouse.get("jobs", job)).get("finished_step", 0))
    except ClickException:
        return 0


async def _ban_left(lighthouse: Lighthouse, job: str, name: str) -> float | None:
    """Return the seconds for which ``name`` is banned from ``job``; 0: not banned; None: no lighthouse answers."""
    try:
        bans = (await lighthouse.get("jobs", job))["bans"]
    except ClickException as error:
        return 0.0 if isinstance(error, Refused) and error.status == HTTPStatus.NOT_FOUND else None
    left = [max(LEAST_SECONDS, ban["until"] - time.time()) for ban in bans if ban["target"] == name]
    return max(left, default=0.0)
