"""Lines of `keepstep run` about its groups, its files, and the sockets for orders."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from keepstep_cli.commands.restart import restart
from keepstep_cli.running.console.log_folder import LogFolder
from keepstep_cli.running.heal_notes import GroupStory
from keepstep_cli.running.run_control import accepting_orders, order_restart, running_here


def event(kind: str, **detail: Any) -> dict[str, Any]:
    return {"kind": kind, "replica_id": "r1:9a7c", "detail": detail}


def test_a_heal_has_size_source_time_and_step() -> None:
    healed = event("healed", bytes=4198, source="r0:77aa", seconds=0.02, step=322, via="direct")
    assert GroupStory().sentence(healed) == "healed 4.1 KiB from r0 in 20 ms, step 322"


def test_failed_heals_in_a_row_are_told_less_and_less_often() -> None:
    story, failed = GroupStory(), event("heal_failed", reason="no progress")
    told = [sentence for _ in range(20) if (sentence := story.sentence(failed)) is not None]
    assert told[0] == "heal failed: no progress"
    assert told[1:] == [f"heal failed {times} times: no progress" for times in (2, 4, 8, 16)]
    story.sentence(event("healed", bytes=1, seconds=1.0, step=1))
    assert story.sentence(failed) == "heal failed: no progress", "counted from the last heal"


def test_other_events_are_left_out() -> None:
    assert GroupStory().sentence(event("suspect")) is None
    assert GroupStory().sentence(event("drain", reason="new cable")) == "drain ordered: new cable"
    assert GroupStory().sentence(event("evicted", reason="old disk")) == "evict ordered: old disk"


def test_each_rank_has_a_file_that_grows_over_restarts(tmp_path: Path) -> None:
    for _ in range(2):
        files = LogFolder(tmp_path / "logs")
        assert files.line("r0", 1, "step 1 \udcff") is None
        files.note("r0", "started")
        files.close()
    assert (tmp_path / "logs" / "r0-1.log").read_text() == "step 1 ?\n" * 2
    assert (tmp_path / "logs" / "run.log").read_text().count(" r0: started\n") == 2


def test_a_folder_that_cannot_be_used_is_an_error_of_usage(tmp_path: Path) -> None:
    with pytest.raises(click.UsageError, match=r"--log-dir .*missing/logs cannot be used: No such file"):
        LogFolder(tmp_path / "missing" / "logs")


def test_a_full_disk_is_reported_once(tmp_path: Path) -> None:
    files = LogFolder(tmp_path)
    (tmp_path / "r0-0.log").symlink_to("/dev/full")
    assert "No space left on device" in str(files.line("r0", 0, "x"))
    assert files.line("r0", 0, "x") is None
    files.close()


async def test_an_order_reaches_the_run_of_its_job_only() -> None:
    restarted: list[str] = []
    job = "j" * 128
    async with accepting_orders(job, ["r0", "r1"], restarted.append):
        (address,) = running_here(job)
        answer = await asyncio.to_thread(order_restart, address, ["r1", "r7"])
        assert running_here("other") == []
    assert answer == {"restarted": ["r1"], "groups": ["r0", "r1"]}
    assert restarted == ["r1"]
    assert str(os.getpid()) in address


RUN = """
import asyncio, os, sys
from keepstep_cli.running.run_control import accepting_orders
async def run():
    async with accepting_orders("contained", [sys.argv[1]], print):
        print("ready", os.getpid(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(run())
"""
CONTAINER = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", RUN)


def test_runs_of_two_containers_that_share_a_network_take_orders() -> None:
    """Each is process 1 of its container."""
    if shutil.which("unshare") is None or subprocess.run([*CONTAINER[:5], "true"], check=False).returncode:
        pytest.skip("needs the right to make a pid namespace")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with ExitStack() as stack:
        for name in ("r0", "r1"):
            run = stack.enter_context(subprocess.Popen([*CONTAINER, name], **pipes))
            assert run.stdout is not None
            assert run.stdout.readline() == "ready 1\n"
        answers = [order_restart(address, ["r1"]) for address in running_here("contained", 1)]
    assert sorted(one["groups"] for one in answers) == [["r0"], ["r1"]]
    assert sum(one["restarted"] == ["r1"] for one in answers) == 1


async def test_an_order_is_refused_if_several_runs_have_a_group_of_this_name(monkeypatch: pytest.MonkeyPatch) -> None:
    job, here, restarted = "twice", os.getpid(), []

    async def order(*flags: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, restart, ["r1", "--job", job, *flags])

    async with AsyncExitStack() as stack:
        for pid in (here, 1):  # a socket is named after its process
            monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
            run = accepting_orders(job, ["r0", "r1"], lambda name, pid=pid: restarted.append((pid, name)))
            await stack.enter_async_context(run)
        refused = await order()
        assert (refused.exit_code, restarted) == (2, [])
        assert f"2 runs of job 'twice' have a group r1; give --pid 1 or {here}" in refused.output
        assert (await order("--pid", "1")).output == "r1 restarts\n"
        assert restarted == [(1, "r1")]
        assert (await order("--pid", "2")).exit_code == 3


def test_a_drained_group_is_not_finished_and_a_job_that_goes_back_is_told() -> None:
    drained = event("left", cause="drained", step=80, reason="new cable")
    assert GroupStory().sentence(drained) == "drained at step 80, not finished; `keepstep restart r1` brings it back"
    assert GroupStory().sentence(event("left", cause="finished", step=80, reason="shutdown")) is None
    back = event("went_back", **{"from": 80, "to": 0, "lost_steps": 80, "reason": "no group was left"})
    told = "the job went back from step 80 to 0 (80 steps are lost): no group was left"
    assert GroupStory().sentence(back) == told


def test_a_file_that_was_rotated_away_is_left(tmp_path: Path) -> None:
    files = LogFolder(tmp_path)
    files.line("r0", 0, "before")
    (tmp_path / "r0-0.log").rename(tmp_path / "r0-0.log.1")
    files.line("r0", 0, "after")
    files.close()
    assert (tmp_path / "r0-0.log.1").read_text() == "before\n"
    assert (tmp_path / "r0-0.log").read_text() == "after\n"
