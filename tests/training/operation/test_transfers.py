"""A slow heal is visible while it runs: over REST, in `keepstep transfers`, in the events, in the joiner's log."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.jobs.job import DEADLINE, Job
from tests.support.services.command import process

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

MIB = 1 << 20
WIDE = {"TRAINER_WIDTH": "80000", "TRAINER_CATCH_UP": "0"}
"""72 MB of weights and optimizer: nine chunks of 8 MiB, which a group would catch up with by default."""
SLOW = {**WIDE, "TRAINER_CHUNK_SECONDS": "0.8", "TRAINER_LOG": "info"}


async def heals_when(job: Job, wanted: Callable[[list[dict[str, Any]]], object]) -> list[dict[str, Any]]:
    async with asyncio.timeout(DEADLINE):
        while not wanted(found := (await job.order("GET", "/transfers"))["heals"]):  # noqa: ASYNC110 - no message tells
            await asyncio.sleep(0.05)
    return found


async def transfers(job: Job, *flags: str) -> str:
    async with process("transfers", "--lighthouse", job.address, *flags) as command, asyncio.timeout(DEADLINE):
        out, error = await command.communicate()
    assert command.returncode == 0, error
    return out.decode()


async def events_of(job: Job, replica_id: str) -> list[dict[str, Any]]:
    events = (await job.order("GET", "/events"))["events"]
    return [one for one in events if one["replica_id"] == replica_id]


async def test_a_slow_heal_is_seen_while_it_runs_and_its_end_as_what_it_was(tmp_path):
    """Takes more than 7 s: the joiner logs the progress of a heal every 5 s."""
    hold = {"TRAINER_HOLD_HEAL_AT": str(24 * MIB), "TRAINER_PAUSE_FILE": str(tmp_path / "go-on")}
    async with Job() as job:
        a = await job.start("a", **WIDE)
        await job.advance(a, steps=2)
        b = await job.start("b", **SLOW, **hold)
        (one,) = await heals_when(job, lambda heals: heals and heals[0]["bytes_done"] >= 24 * MIB)
        names = {line["replica_id"] for line in (*a.lines, *b.lines) if line["event"] == "started"}
        assert {one["replica_id"], one["source"]} == names
        assert one["source"].startswith("a:")
        assert (one["via"], one["step"] > 0) == ("direct", True)
        assert 70e6 < one["bytes_total"] < 75e6
        assert 0 < one["bytes_per_second"] < 30 * MIB, "at most 8 MiB in 0.8 s"
        left = (one["bytes_total"] - one["bytes_done"]) / one["bytes_per_second"]
        assert one["seconds_left"] == pytest.approx(left)
        (listed,) = json.loads(await transfers(job, "--json"))["heals"]
        assert one["bytes_done"] <= listed["bytes_done"] < listed["bytes_total"] == one["bytes_total"]
        text = await transfers(job)
        rate = r"(\d+\.\d MiB/s +[\d.]+ s|0 B/s +-)"  # the second when the heal is held for longer than rates look back
        assert re.search(rf" b:\w{{8}} +\d+ +a:\w{{8}} +direct +\d\d% of \d\d\.\d MiB +{rate} ", text), text

        (tmp_path / "go-on").touch()
        await job.advance(a, b, steps=2)
        assert (await job.order("GET", "/transfers"))["heals"] == []
        assert "nothing moves" in await transfers(job)
        history = await events_of(job, one["replica_id"])
        assert [event["kind"] for event in history] == ["joined", "heal_began", "healed"]
        healed = history[-1]["detail"]
        assert (healed["source"], healed["via"], healed["bytes"]) == (one["source"], "direct", one["bytes_total"])
        assert healed["seconds"] > 6.0, "nine chunks of 0.8 s each"
        assert healed["bytes_per_second"] == pytest.approx(healed["bytes"] / healed["seconds"], rel=0.01)
        lines = [line for line in b.output if re.search(r":(heal began|healing|healed) ", line)]
        assert re.search(r"heal began .*step=\d+ source=a:\S+ via=direct percent=\d+ .*mib_per_second=\d", lines[0])
        assert [line for line in lines[1:-1] if "healing" in line and re.search(r"seconds_left=\d", line)]
        assert re.search(rf"healed .*step=\d+ .*via=direct bytes={healed['bytes']} seconds=", lines[-1])
        assert len(lines) <= 2 + healed["seconds"] / 5
        assert job.assert_identical() >= 2


async def test_a_joiner_that_is_killed_while_it_heals_heals_no_longer():
    async with Job() as job:
        a = await job.start("a", **WIDE)
        await job.advance(a, steps=2)
        b = await job.start("b", **SLOW)
        (one,) = await heals_when(job, lambda heals: heals and heals[0]["bytes_done"])
        b.kill()
        await heals_when(job, lambda heals: not heals)
        await job.advance(a, steps=2)
        history = await events_of(job, one["replica_id"])
        assert [event["kind"] for event in history] == ["joined", "heal_began", "suspect", "heal_failed", "lost"]
        failed = history[-2]["detail"]
        assert one["bytes_done"] <= failed["bytes"] < one["bytes_total"]
        assert "its connection ended" in failed["reason"]


async def test_a_heal_whose_source_dies_fails_and_says_why():
    async with Job() as job:
        a, c = [await job.start(name, **WIDE) for name in ("a", "c")]
        await job.advance(a, c, steps=2)
        b = await job.start("b", **SLOW | {"TRAINER_CHUNK_SECONDS": "0.25"})
        (one,) = await heals_when(job, lambda heals: heals and heals[0]["bytes_done"])
        source, other = (a, c) if one["source"].startswith("a:") else (c, a)
        source.kill()
        await job.advance(b, other, steps=2)
        history = await events_of(job, one["replica_id"])
        ends = [event for event in history if event["kind"].startswith("heal")]
        assert [event["kind"] for event in ends] == ["heal_began", "heal_failed", "heal_began", "healed"]
        assert (ends[1]["detail"]["source"], ends[1]["detail"]["reason"][:6]) == (one["source"], "rank 0")
        assert ends[3]["detail"]["source"].startswith(f"{other.name}:")
        assert job.assert_identical() >= 1
