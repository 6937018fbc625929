"""A bit that flips in the weights of one group of real trainers: found, named, and healed or drained."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any

import pytest

from tests.support.jobs.job import DEADLINE, Group, Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

EVERY, FLIPPED_AT = 10, 23
FOUND_AT = 30
"""The first step after the flip that ``EVERY`` divides: compared when the next one begins, healed in that."""


async def events(job: Job, *kinds: str) -> list[dict[str, Any]]:
    return [one for one in (await job.order("GET", "/events"))["events"] if one["kind"] in kinds]


async def verify_replicas(job: Job, *flags: str) -> tuple[int, str]:
    """Exit code and what was printed."""
    command = [sys.executable, "-m", "keepstep_cli", "verify-replicas", "--lighthouse", job.address, *flags]
    run = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    async with asyncio.timeout(DEADLINE):
        said, _ = await run.communicate()
    return run.returncode or 0, said.decode()


def steps_apart(one: Group, other: Group) -> set[int]:
    """Steps that both committed, with different weights."""
    mine, theirs = one.committed(), other.committed()
    return {step for step in mine.keys() & theirs.keys() if mine[step] != theirs[step]}


async def start_three(job: Job, **environment: str) -> tuple[Group, Group, Group]:
    """A bit of c's weights will flip. BatchNorm's statistics are compared too: they are averaged before."""
    environment["TRAINER_BATCH_NORM"] = "1"
    a, b = [await job.start(name, **environment) for name in "ab"]
    return a, b, await job.start("c", TRAINER_FLIP_AT=str(FLIPPED_AT), **environment)


@pytest.mark.parametrize("sync", ["", "1"], ids=["async", "sync"])
async def test_every_k_steps_a_flipped_bit_is_found_named_and_healed(sync: str) -> None:
    async with Job("--verify-every", str(EVERY), min_replicas=3) as job:
        a, b, c = await start_three(job, TRAINER_SYNC=sync)
        await job.until(lambda: c.step() > FOUND_AT, "the step after the comparison")
        await job.advance(a, b, c, steps=2 * EVERY)

        (found,) = await events(job, "replica_diverged")
        assert found["replica_id"].startswith("c:")
        assert found["detail"] == {"step": FOUND_AT, "action": "heal"}
        assert "weights differ from those of the other groups" in "\n".join(c.output)
        log = (job.directory / "lighthouse.log").read_text()
        assert re.search(r"replica_diverged.*c:", log), log[-2000:]
        compared = await events(job, "replicas_verified", "replicas_differ")
        after_start, after_heal = 3, FOUND_AT + 4
        assert [one["detail"]["step"] for one in compared][:5] == [after_start, 10, 20, FOUND_AT, after_heal]
        assert [one["kind"] for one in compared[:5]] == [
            *["replicas_verified"] * 3,
            "replicas_differ",
            "replicas_verified",
        ]
        assert not steps_apart(a, b)
        assert steps_apart(a, c) == set(range(FLIPPED_AT + 1, FOUND_AT + 2))
        steps = [json.loads(line) for line in (job.logs / "c.jsonl").read_text().splitlines()]
        told = [(one["event"], one["step"]) for one in steps if one["event"] in ("diverged", "healed")]
        assert told[-2:] == [("diverged", FOUND_AT + 1), ("healed", FOUND_AT + 1)]


async def test_on_order_a_flipped_bit_is_found_named_and_drained() -> None:
    async with Job("--on-divergence", "drain", "--verify-every", "0", min_replicas=2) as job:
        a, b, c = await start_three(job)
        await job.until(lambda: any(line["event"] == "flipped" for line in c.lines), "a bit is flipped")
        code, said = await verify_replicas(job)
        assert code == 1, said
        rows = {name: line for line in said.splitlines() for name in re.findall(r"^ *([abc]):", line)}
        assert [name for name, row in sorted(rows.items()) if "differs" in row] == ["c"]
        roots = {name: row.split()[1] for name, row in rows.items()}
        assert roots["a"] == roots["b"] != roots["c"]
        assert await c.exit_codes() == [0]
        (left,) = [line for line in c.lines if line["event"] == "left"]
        assert "weights differ" in left["reason"]

        await job.advance(a, b)
        code, said = await verify_replicas(job, "--json")
        assert code == 0, said
        event = json.loads(said)
        (groups,) = event["detail"]["roots"].values()
        assert (event["kind"], [one[0] for one in groups], event["detail"]["missing"]) == (
            "replicas_verified",
            ["a", "b"],
            [],
        )
        assert not steps_apart(a, b)
        assert steps_apart(a, c)
