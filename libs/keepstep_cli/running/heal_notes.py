"""Follow the events of the job, and report what they say about the groups of this ``keepstep run``."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from click import ClickException

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.errors import Refused
from keepstep_cli.running.bans import name_at_lighthouse
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.text import bytes_text, seconds_text

Note = Callable[[str, str], None]
FIRST_TRIES_SECONDS = 0.1
"""Between tries to learn the newest event, until which nothing of this run is reported."""
AGAIN_SECONDS = 2.0


async def follow_heals(
    lighthouse: Lighthouse, job: str, groups: Iterable[str], names: Path, note: Note, told: Callable[[str], None]
) -> None:
    """Report heals and orders of ``groups`` through ``note``, until cancelled. Retries while no lighthouse answers.

    Args:
        groups: their local names.
        names: folder in which each group writes its name at the lighthouse, to a file with its local name.
        told: called with a group once its verdict is reported.
    """
    story, after = GroupStory(), None
    while True:
        try:
            if after is None:  # once: an event that comes between two tries is not lost
                after = await _newest(lighthouse, job)
            async for event in lighthouse.follow("jobs", job, "events", after=after, told=lambda _: None, follow=1):
                after = event["id"]
                about_job = not event["replica_id"]
                group = "run" if about_job else _local_name(name_of(event["replica_id"]), groups, names)
                if group is not None and (sentence := story.sentence(event)) is not None:
                    note(group, sentence)
                if group is not None and event["kind"] == "incident":
                    told(group)
        except ClickException:
            await asyncio.sleep(FIRST_TRIES_SECONDS if after is None else AGAIN_SECONDS)


async def _newest(lighthouse: Lighthouse, job: str) -> int:
    """Return the number of the newest event; 0 if the job does not exist yet."""
    try:
        events = (await lighthouse.get("jobs", job, "events", limit=1))["events"]
    except Refused as error:
        if error.status != HTTPStatus.NOT_FOUND:
            raise
        return 0
    return max((event["id"] for event in events), default=0)


def _local_name(name: str, groups: Iterable[str], names: Path) -> str | None:
    for group in groups:
        if name == name_at_lighthouse(names, group):
            return group
    return None


class GroupStory:
    """Sentences for events of groups. Of failed heals in a row it tells the 1st, 2nd, 4th, 8th ..."""

    def __init__(self) -> None:
        self._failed: Counter[str] = Counter()

    def sentence(self, event: dict[str, Any]) -> str | None:
        """Return a sentence for this event; None if it is of no interest here."""
        detail, name = event["detail"], name_of(event["replica_id"])
        match event["kind"]:
            case "healed":
                self._failed[name] = 0
                source = f" from {name_of(detail['source'])}" if detail.get("source") else ""
                size, seconds = bytes_text(detail["bytes"]), seconds_text(detail["seconds"])
                return f"healed {size}{source} in {seconds}, step {detail['step']}"
            case "heal_failed":
                self._failed[name] += 1
                times = self._failed[name]
                if times & (times - 1):
                    return None
                return f"heal failed{f' {times} times' if times > 1 else ''}: {detail['reason']}"
            case "left" if detail.get("cause") == "drained" and detail["step"]:
                return f"drained at step {detail['step']}, not finished; `keepstep restart {name}` brings it back"
            case "spare_in":
                return f"takes part from now on: {detail['reason']}"
            case "replace":
                return f"a spare is to take its place: {detail['reason']}"
            case "went_back":
                lost = f"{detail['lost_steps']} steps are lost"
                return f"the job went back from step {detail['from']} to {detail['to']} ({lost}): {detail['reason']}"
            case "incident":
                return f"why it ended: {detail['verdict']}: {detail['reason']}"
            case "drain" | "evicted" as kind:
                return f"{'evict' if kind == 'evicted' else kind} ordered: {detail.get('reason', '')}"
            case "runtime_differs":
                return f"warning: runs {detail['runtime']}; the other groups run {detail['others']}"
        return None
