"""Losses that come together, and networks and scripts that fail, in real processes: each has a named result.

Slow: each test trains in several processes, some of which start again.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from keepstep_mesh.exit_codes import EXIT_GROUP_FAILED, EXIT_STATE_LOST
from tests.support.jobs.job import DEADLINE
from tests.support.jobs.one_copy_job import OneCopyJob, undisturbed
from tests.support.jobs.one_copy_members import members
from tests.support.network.namespaces import Host, Namespaces, why_not

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]


@pytest.mark.parametrize("copies", [1, 2])
async def test_a_member_that_is_killed_with_its_keeper_is_lost_unless_another_one_keeps_it(
    tmp_path: Path, copies: int
) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", "m3", count=4, COPIES=str(copies))
        await job.trains("m0", "m1", "m2", "m3")
        names = [job.seats()[seat] for seat in (1, 2)]
        left = [job.seats()[seat] for seat in (0, 3)]
        for name in names:
            job.processes[name].send_signal(signal.SIGKILL)
        if copies == 2:
            await job.trains(*left)
            await job.finish(*left)
            return
        for name in left:
            assert await job.code(name) == EXIT_STATE_LOST, job.output()
            said = job.text(name).partition("together with all copies of them: ")[2]
            assert said.startswith(f"{names[0]}:"), job.text(name)
            assert f"(kept by {names[1]}:" in said


async def test_members_that_pause_return_at_once_or_only_stand_by_disturb_nothing(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3, spares=1)
        await job.trains("m0", "m1", "m2")
        job.start("m3", count=3, spares=1)
        await job.until(lambda: job.core.quorum_view(0.0).spares, "a spare")
        job.kill("m3")
        await job.until(lambda: not job.core.quorum_view(0.0).spares, "the spare is gone")
        await job.trains("m0", "m1", "m2")
        job.processes["m1"].send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{job.processes['m1'].pid}/stat")
        await job.until(lambda: ") T " in stat.read_text(), "m1 is frozen")
        job.processes["m1"].send_signal(signal.SIGCONT)
        await job.trains("m0", "m1", "m2")
        assert [one.detail["how"] for one in job.events("world_formed")] == ["fresh"]
        job.kill("m1")
        job.start("m1", count=3, spares=1)
        await job.trains("m0", "m1", "m2")
        await job.finish("m0", "m1", "m2")


async def test_a_build_that_gives_another_model_after_a_loss_waits_for_the_lost_member(
    tmp_path: Path,
) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=3)
        job.start("m2", count=3, WIDTH_IN_WORLD="2:24")
        await job.trains("m0", "m1", "m2")
        job.kill("m1")
        reason = "no step possible; waiting for other members reason=build() returns another model than before"
        await job.until(lambda: all(reason in job.text(name) for name in ("m0", "m2")), "both say so")
        steps = len(job.steps("m0"))
        job.start("m1", count=3)
        await job.trains("m0", "m1", "m2")
        assert job.steps("m0")[steps]["step"] == job.steps("m0")[steps - 1]["step"] + 1, "no step is lost"
        await job.finish("m0", "m1", "m2")


@pytest.mark.parametrize("spares", [0, 1])
async def test_a_build_that_takes_longer_than_the_timeout_is_waited_for(tmp_path: Path, spares: int) -> None:
    built, count = tmp_path / "built", 3 - spares
    more = {"KEEPSTEP_TIMEOUT_SEC": "4", "BUILD_TIMEOUT": "600" if spares else "6"}
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=count, spares=spares, **more)
        if spares:
            await job.trains("m0", "m1")
        job.start("m2", count=count, spares=spares, BUILD=str(built), **more)
        waiting = ["m0", "m1"]
        if spares:
            await job.until(lambda: job.asks("m2"), "a spare that asks")
            job.kill("m1")
            waiting.remove("m1")
        said = "build() takes longer than timeout; waiting for it"
        await job.until(lambda: all(said in job.text(one) for one in waiting), "they say so")
        if spares:
            await job.change_policy(hang_after=20.0)
            await job.until(lambda: any("section 'build()'" in one for one in job.core.hang_sentences()), "its status")
            await job.change_policy(hang_after=0.0)
        else:
            reason = "from m2 (rank 0), which is in build(); raise build_timeout"
            await job.until(lambda: any(reason in job.text(one) for one in waiting), "they try again")
        built.touch()
        await job.trains(*waiting, "m2")
        if spares:
            assert [one.detail["how"] for one in job.events("world_formed")] == ["fresh", "replaced"]
        await job.finish(*waiting, "m2")


async def test_members_that_do_not_fill_the_mesh_wait_and_say_for_what(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        mesh = '{"fsdp": -1, "tp": 2}'
        job.start("m0", count=1, MESH=mesh)
        reason = "the mesh of the training script needs a multiple of 2 groups"
        await job.until(lambda: reason in job.text("m0"), "the member says so")
        assert reason in job.core.quorum_view(0.0).reason.sentence
        job.start("m1", count=1, MESH=mesh)
        await job.trains("m0", "m1")
        await job.finish("m0", "m1")


async def test_a_keeper_without_memory_leaves_its_owner_exposed_until_it_has_memory_again(tmp_path: Path) -> None:
    full = tmp_path / "full"
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=2, FULL=str(full))
        await job.trains("m0", "m1")
        full.touch()
        await job.until(lambda: len(job.core.quorum_view(0.0).exposed) == 2, "exposed members")
        assert all("no memory for" in one for one in job.core.quorum_view(0.0).exposed)
        await job.trains("m0", "m1")
        full.unlink()
        await job.until(lambda: not job.core.quorum_view(0.0).exposed, "no exposed members")
        assert [one.detail["how"] for one in job.events("world_formed")] == ["fresh"], "without a recovery"
        job.kill("m0")
        await job.trains("m1")
        await job.finish("m1")


@pytest.mark.parametrize("where", ["inside", "at the end", "outside"])
async def test_a_member_that_dies_during_a_save_ends_only_a_save_outside_of_an_attempt(
    tmp_path: Path, where: str
) -> None:
    go = tmp_path / "go"
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3, SAVES=where, SAVE=str(go))
        if where == "at the end":
            await job.trains("m0", "m1", "m2")
            await job.change_policy(finish_grace=0.0)
            (tmp_path / "stop").touch()
        await job.until(lambda: len([*tmp_path.glob("go.*")]) == 3, "all save")
        job.kill("m1")
        go.touch()
        if where == "outside":
            assert await job.code("m0") == 1
            assert "outside of `with job.attempt()`" in job.text("m0")
            return
        if where == "inside":
            await job.trains("m0", "m2")
        await job.finish("m0", "m2")
        saves = [json.loads(line) for line in job.text("m0").splitlines() if line.startswith('{"saved"')]
        assert [one["elements"] for one in saves] == ([544] if where == "at the end" else [])


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_script_that_fails_between_two_steps_ends_with_its_error_and_the_others_hear_it(
    tmp_path: Path, ranks: int
) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m2", count=3, ranks=ranks)
        job.start("m1", count=3, ranks=ranks, FAILS_AT="3")
        await job.until(lambda: all(one.poll() is not None for one in job.ranks_of("m1")), "its end")
        assert {one.wait() for one in job.ranks_of("m1")} <= {1, EXIT_GROUP_FAILED}, job.output()
        assert "ValueError: a bug of this member" in job.text("m1") + (job.text("m1.1") if ranks > 1 else "")
        (lost,) = [one.detail["reason"] for one in job.events("lost")]
        assert "ended with ValueError: a bug of this member" in lost
        await job.trains("m0", "m2")
        await job.finish("m0", "m2")


async def test_a_script_that_steps_the_optimizer_by_itself_is_told_that_commit_does(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", count=1, STEPS="1")
        assert await job.code("m0") == 1
        assert "commit() steps the optimizer: remove optimizer.step()" in job.text("m0")


async def test_a_step_that_is_refused_again_and_again_ends_all_members_with_the_reason(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=3, REFUSE="1")
        job.start("m2", count=3, REFUSE="1", NAN_AT="3")
        assert [await job.code(name) for name in ("m0", "m1", "m2")] == [1, 1, 1], job.output()
        said = "the step after step 3 was refused 4 times in a row: "
        assert all(f"{said}a rank refused the step; each attempt" in job.text(name) for name in ("m0", "m1"))
        assert f"{said}gradients of this rank are not finite; each attempt" in job.text("m2")


class NetworkedJob(OneCopyJob):
    """Each member, and the lighthouse, on a host of its own."""

    def __init__(self, network: Namespaces, *flags: str, min_replicas: int) -> None:
        self.network = network
        self.node = network.host("lighthouse")
        super().__init__(*flags, min_replicas=min_replicas)
        self.address = f"http://{self.node.address}:{self.port}"

    def host_of(self, group: str) -> Host:
        return self.network.host(group)

    async def start_lighthouse(self) -> None:
        bind = f"{self.node.address}:{self.port}"
        flags = ("--bind", bind, "--min-replicas", str(self._min_replicas), "--insecure", *self._flags)
        with (self.directory / "lighthouse.log").open("ab") as log:
            self.lighthouse = await asyncio.create_subprocess_exec(
                *(*self.node.command, sys.executable, "-m", "keepstep_cli", "lighthouse", *flags),
                stdout=log,
                stderr=log,
            )

    async def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of this kind."""
        return [one for one in (await self.order("GET", "/events"))["events"] if one["kind"] == kind]

    def isolate(self, name: str) -> None:
        for other in ("lighthouse", *(one for one in self.groups if one != name)):
            self.network.cut(name, other)


async def test_a_member_that_is_cut_off_is_replaced_and_comes_back() -> None:
    if reason := why_not():
        pytest.skip(reason)
    _, shards, losses = await undisturbed(3, kind="clip", steps=12)
    with Namespaces() as network:
        async with (
            NetworkedJob(network, "--heartbeat-timeout", "2", min_replicas=3) as job,
            asyncio.TaskGroup() as tasks,
        ):
            training = tasks.create_task(job.train(3, 1, kind="clip", steps=12, holds="4,10"))
            await job.until(lambda: sum(key[0] == 4 for key in job.shards()) == 3, "four steps", DEADLINE)
            name = next(n for n, one in job.groups.items() if any(e["event"] == "committed" for e in one.lines))
            job.isolate(name)
            (job.directory / "go.4").touch()
            await job.until(lambda: sum(key[0] == 10 for key in job.shards()) == 3, "the others go on", DEADLINE)
            network.mend()
            await job.until_asking(lambda names: name in names)
            (job.directory / "go.10").touch()
            await training
            assert {key: value for key, value in job.shards().items() if key[0] <= 10} == {
                key: value for key, value in shards.items() if key[0] <= 10
            }
            assert job.losses() == pytest.approx(losses, rel=1e-5), "it is a fourth member from then on"


@pytest.mark.parametrize("spares", [0, 1])
async def test_one_of_two_members_that_cannot_reach_each_other_is_replaced_or_left_out(
    monkeypatch: pytest.MonkeyPatch, spares: int
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    monkeypatch.setenv("KEEPSTEP_TIMEOUT_SEC", "20")
    _, shards, losses = await undisturbed(3, kind="clip", steps=12)
    with Namespaces() as network:
        async with NetworkedJob(network, min_replicas=2 + spares) as job, asyncio.TaskGroup() as tasks:
            training = tasks.create_task(job.train(3, spares, kind="clip", steps=12, holds="4,8"))
            await job.until(lambda: sum(key[0] == 4 for key in job.shards()) == 3, "four steps", DEADLINE)
            ranks = {e["rank"]: n for n, one in job.groups.items() for e in one.lines if e["event"] == "committed"}
            network.cut(ranks[1], ranks[2])
            (job.directory / "go.4").touch()
            await job.until(lambda: sum(key[0] == 8 for key in job.shards()) == 2 + spares, "others go on", DEADLINE)
            (reason,) = [one["detail"]["reason"] for one in await job.events("parted")]
            assert "cannot reach each other" in reason
            out = reason.partition(" ")[0]
            assert out in (ranks[1], ranks[2])
            network.mend()
            await job.order("POST", f"/replicas/{out}/readmit")
            await job.until_asking(lambda names: out in names)
            (job.directory / "go.8").touch()
            await training
            if spares:
                assert {key: value for key, value in job.shards().items() if key[0] <= 8} == {
                    key: value for key, value in shards.items() if key[0] <= 8
                }
            assert job.losses() == pytest.approx(losses, rel=1e-5)
