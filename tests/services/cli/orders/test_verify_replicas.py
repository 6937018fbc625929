"""`keepstep verify-replicas` with groups that say what root digest the test likes."""

from __future__ import annotations

import asyncio
import json
import re

from keepstep_mesh.protocol.membership import StateRoot
from tests.services.cli.scene import Job, Said, keepstep, running
from tests.support.services.lighthouse_driver import eventually


async def compared(job: Job, *roots: str, flags: tuple[str, ...] = ()) -> Said:
    """`verify-replicas` of groups that say these roots, each its own; none for ""."""
    async with asyncio.TaskGroup() as tasks:
        said = tasks.create_task(keepstep("verify-replicas", *job.at, *flags))
        await eventually(lambda: job.lighthouse.events.latest("default", "verify_ordered", "") is not None)
        asked = await asyncio.gather(*(group.ask(2) for group in job.groups))
        assert all(quorum.verify for quorum in asked)
        known = [StateRoot(2, "state 2", root) if root else None for root in roots]
        await asyncio.gather(*(group.ask(3, root=root) for group, root in zip(job.groups, known, strict=True)))
    return said.result()


async def test_verify_replicas_finds_equal_groups_equal_and_names_those_that_say_nothing() -> None:
    async with running("r0", "r1", "r2") as job:
        said = await compared(job, "a" * 64, "a" * 64, "")
        assert said.code == 0, said.err
        assert re.search(r"r0:1 +a{16} *\n +r1:1 +a{16} *\n +r2:1 +- *\n", said.out), said.out
        assert "step 2, 2 groups: all have equal weights, the others said nothing" in said.out


async def test_verify_replicas_names_the_group_that_differs_and_exits_with_1() -> None:
    async with running("r0", "r1", "r2") as job:
        said = await compared(job, "a" * 64, "b" * 64, "a" * 64)
        assert said.code == 1, said.err
        assert re.search(r"r1:1 +b{16} +differs", said.out), said.out
        assert "step 2, 3 groups: differ from the majority: r1:1; healed" in said.out


async def test_verify_replicas_of_two_that_differ_says_that_nobody_can_tell() -> None:
    async with running("r0", "r1") as job:
        said = await compared(job, "a" * 64, "b" * 64)
        assert said.code == 1, said.err
        assert "differs" not in said.out
        assert "without a majority; no action" in said.out


async def test_verify_replicas_has_json() -> None:
    async with running("r0", "r1") as job:
        said = await compared(job, "a" * 64, "a" * 64, flags=("--json",))
        event = json.loads(said.out)
        assert (event["kind"], event["detail"]["roots"]) == ("replicas_verified", {"a" * 64: ["r0:1", "r1:1"]})


async def test_verify_replicas_of_groups_that_do_not_train_ends_in_time_and_says_why() -> None:
    async with running("r0", "r1") as job:
        said = await keepstep("verify-replicas", "--wait", "200ms", *job.at)
        assert (said.code, said.out) == (1, "")
        assert "were not compared within 0.2 s" in said.err
