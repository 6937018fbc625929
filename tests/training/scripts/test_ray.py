"""Examples with Ray from PyPI, on several nodes: groups are killed, nodes come and go, all groups end alike."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import pytest

from keepstep_mesh.net.addresses import outward_address
from keepstep_mesh.net.http import client_session, raise_for_problem
from tests.support.network.certificates import Authority
from tests.support.services.command import environment

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install -e '.[ray]'"),
    pytest.mark.training,
]

ROOT = Path(__file__).parents[3]
NODES = ROOT / "tests" / "support" / "jobs" / "ray_nodes.py"
ADMIN = "admin-of-the-test-run"
DEADLINE = 1500.0
"""Limit in seconds of each wait: Ray starts nine processes before the first worker, each with its imports."""


class Run:
    """An example in a process with a Ray cluster of several nodes. ``variables``: further ones of its environment."""

    def __init__(self, nodes: int, script: str = "train_ray.py", **variables: str) -> None:
        self.lines: list[str] = []
        self._nodes, self._script, self._variables = nodes, ROOT / "examples" / script, variables
        self._changed = asyncio.Condition()
        self._folder = tempfile.TemporaryDirectory(prefix="ray-")  # a path of sockets must be short

    async def __aenter__(self) -> Self:
        variables = environment(
            KEEPSTEP_ADMIN_TOKEN=ADMIN,
            KEEPSTEP_JOB="digits",
            HOME=self._folder.name,  # of the results of runs
            RAY_TMPDIR=self._folder.name,
            RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S="0.5",
            RAY_DEDUP_LOGS="0",
            RAY_USAGE_STATS_ENABLED="0",
            PYTHONUNBUFFERED="1",
            STEPS="600",
            **self._variables,
        )
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-u", str(NODES), str(self._nodes), str(self._script)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGINT)  # it stops the cluster
        try:
            async with asyncio.timeout(60):
                await self._reader
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._reader.cancel()
            await self._process.wait()
            for one in psutil.Process().children(recursive=True):  # actors outlive their node for some seconds
                with contextlib.suppress(psutil.NoSuchProcess):
                    if "ray::" in " ".join(one.cmdline()):
                        one.kill()
            self._folder.cleanup()

    async def _read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            async with self._changed:
                self.lines.append(line.decode(errors="replace").rstrip())
                self._changed.notify_all()
        await self._process.wait()
        async with self._changed:
            self._changed.notify_all()

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait until ``condition`` is true; it is checked after each line."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE), self._changed:
                await self._changed.wait_for(lambda: condition() or self._process.returncode is not None)
        assert condition(), "\n".join([f"not seen: {what}", *self.lines[-60:]])

    async def exit_code(self) -> int:
        await self.until(lambda: self._process.returncode is not None, "the script ends")
        return self._process.returncode or 0

    def say(self, order: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{order}\n".encode())

    def found(self, pattern: str) -> list[re.Match[str]]:
        """All lines with the pattern. Ray writes the name and pid of the worker before each."""
        return [match for line in self.lines if (match := re.search(pattern, line))]

    def starts(self, group: int, rank: int | None = None) -> list[tuple[int, str, str]]:
        """The pid, node and lighthouse of each start of a group, or of a rank of it. Ray may write a line twice."""
        of_rank = "" if rank is None else f" rank {rank}"
        pattern = rf"group {group}{of_rank} process (\d+) node (\w+) lighthouse (\S+)"
        return list(dict.fromkeys((int(one[1]), one[2], one[3]) for one in self.found(pattern)))

    def step(self, group: int, groups: int = 3) -> int:
        """The last step that a group printed of those with so many groups."""
        return max((int(one[1]) for one in self.found(rf"group {group} step (\d+) groups {groups}")), default=0)


async def ask(lighthouse: str, method: str, path: str = "", **body: Any) -> Any:
    headers = {"Authorization": f"Bearer {ADMIN}"}
    url = f"{lighthouse}/v1/jobs/digits{path}"
    async with (
        client_session(timeout=60) as http,
        http.request(method, url, json=body or None, headers=headers) as answer,
    ):
        await raise_for_problem(answer)
        return await answer.json()


@pytest.mark.timeout(3600)
async def test_a_killed_worker_heals_and_the_group_of_a_drained_node_comes_back_on_another_one() -> None:
    """Slow: a Ray cluster of four nodes, one without a worker, and five workers that import Ray and torch."""
    async with Run(4) as run:
        await run.until(lambda: all(run.step(group) for group in range(3)), "all train")
        lighthouse = run.starts(0)[0][2]
        assert not lighthouse.startswith(("http://0.0.0.0", "http://[::]")), "it listens at one address"
        async with client_session(timeout=60) as http, http.get(f"{lighthouse}/v1/jobs") as answer:
            assert answer.status == 401, "without a token"

        before = run.step(0)
        os.kill(run.starts(2)[0][0], signal.SIGKILL)
        await run.until(lambda: run.step(0, groups=2) > before, "the others go on")
        await ask(lighthouse, "PATCH", min_replicas=3)  # they wait for it, however long its imports take
        await run.until(lambda: len(run.starts(2)) == 2, "Ray Train starts the killed worker again")
        healed = run.step(0, groups=2)
        await run.until(lambda: min(run.step(group) for group in range(3)) > healed, "it heals and trains")

        head = run.found(r"head (\w+)")[0][1]
        drained = next(group for group in range(3) if run.starts(group)[-1][1] != head)
        node, starts = run.starts(drained)[-1][1], len(run.starts(drained))
        run.say(f"drain {node} 600")
        await run.until(lambda: run.found("the group has left"), "the group of the drained node leaves")
        events = (await ask(lighthouse, "GET", "/events"))["events"]
        left = [
            (one["replica_id"].partition(":")[0], one["detail"]["cause"]) for one in events if one["kind"] == "left"
        ]
        assert left == [(f"r{drained}", "drained")]
        run.say(f"end {node}")
        await run.until(lambda: len(run.starts(drained)) > starts, "Ray Train starts it on another node")
        assert run.starts(drained)[-1][1] != node

        assert await run.exit_code() == 0, "\n".join(run.lines[-60:])
        ends = {match[1]: match[2] for match in run.found(r"group (\d) (ends at step 600 weights \w+)")}
        assert len(ends) == 3
        assert len(set(ends.values())) == 1, "equal weights"
        assert float(run.found(r"'accuracy': ([\d.]+)")[0][1]) > 0.8


@pytest.mark.timeout(3600)
async def test_a_spare_takes_the_place_of_a_killed_worker_with_a_lighthouse_that_speaks_tls(tmp_path: Path) -> None:
    """Slow: a Ray cluster of three nodes, and four workers that import Ray and torch."""
    authority = Authority(tmp_path)
    certificates = {
        "KEEPSTEP_LIGHTHOUSE_TLS_CERT": str(authority.certificate(outward_address())),
        "KEEPSTEP_TLS_CA": str(authority.pem),
    }
    async with Run(3, SPARES="1", **certificates) as run:

        def training() -> list[int]:
            return [group for group in range(3) if run.step(group, groups=2)]

        await run.until(lambda: len(training()) == 2, "two train")
        (killed, other), (spare,) = training(), set(range(3)) - set(training())
        assert run.starts(other)[0][2].startswith("https://")
        os.kill(run.starts(killed)[0][0], signal.SIGKILL)
        await run.until(lambda: spare in training(), "the spare trains")
        assert len(run.starts(killed)) == 1, "before Ray Train has started the killed worker again"

        assert await run.exit_code() == 0, "\n".join(run.lines[-60:])
        ends = {match[1]: match[2] for match in run.found(r"group (\d) (ends at step 600 weights \w+)")}
        assert ends.keys() >= {str(other), str(spare)}
        assert len(set(ends.values())) == 1, "equal weights"


def ends_of_ranks(run: Run) -> dict[tuple[str, str], str]:
    """The weights with which each rank has ended, by its group and rank."""
    return {(one[1], one[2]): one[3] for one in run.found(r"group (\d) rank (\d) ends at step 600 weights (\w+)")}


def equal_ends(run: Run, ends: int) -> None:
    """Check that so many ranks have ended, all with the same weights."""
    found = ends_of_ranks(run)
    assert len(found) == ends
    assert len(set(found.values())) == 1, "equal weights"
    assert float(run.found(r"'accuracy': ([\d.]+)")[0][1]) > 0.8


@pytest.mark.timeout(3600)
async def test_a_group_of_two_ranks_starts_again_as_a_whole_while_the_other_one_trains() -> None:
    """Slow: a Ray cluster of two nodes, and six workers that import Ray and torch."""
    async with Run(2, "train_ray_groups.py", CPUS="2") as run:
        await run.until(lambda: all(run.step(group, groups=2) for group in range(2)), "both groups train")
        places = [{run.starts(group, rank)[0][1] for rank in range(2)} for group in range(2)]
        assert [len(nodes) for nodes in places] == [1, 1], "the ranks of a group are on one node"
        lighthouse, before = run.starts(0, 0)[0][2], run.step(0, groups=2)
        os.kill(run.starts(1, 1)[0][0], signal.SIGKILL)
        await run.until(lambda: run.step(0, groups=1) > before, "the other group goes on")
        await ask(lighthouse, "PATCH", min_replicas=2)  # it waits for the one that starts, however long that takes
        await run.until(lambda: [len(run.starts(1, rank)) for rank in range(2)] == [2, 2], "both ranks start again")
        healed = run.step(0, groups=1)
        await run.until(lambda: min(run.step(group, groups=2) for group in range(2)) > healed, "it heals and trains")
        assert await run.exit_code() == 0, "\n".join(run.lines[-60:])
        assert [len(run.starts(0, rank)) for rank in range(2)] == [1, 1], "the other group did not start again"
        equal_ends(run, 4)


@pytest.mark.timeout(3600)
async def test_a_spare_of_two_ranks_takes_the_place_of_a_group_that_loses_one_of_its_ranks() -> None:
    """Slow: a Ray cluster of three nodes, and eight workers that import Ray and torch."""
    async with Run(3, "train_ray_groups.py", CPUS="2", LEAST="6", MOST="6", SPARES="1") as run:

        def training() -> list[int]:
            return [group for group in range(3) if run.step(group, groups=2)]

        await run.until(lambda: run.found(r"group \d step"), "a group trains")
        lighthouse = run.starts(int(run.found(r"group (\d) step")[0][1]), 0)[0][2]
        await ask(lighthouse, "PATCH", min_replicas=2)  # it waits for the second one, however long its imports take
        await run.until(lambda: len(training()) == 2, "two groups train")
        (killed, other), (spare,) = training(), set(range(3)) - set(training())
        await run.until(lambda: all(run.starts(spare, rank) for rank in range(2)), "both ranks of the spare run")
        os.kill(run.starts(killed, 1)[0][0], signal.SIGKILL)
        await run.until(lambda: spare in training(), "the spare trains")
        events = (await ask(lighthouse, "GET", "/events"))["events"]
        came = [one["replica_id"].partition(":")[0] for one in events if one["kind"] == "spare_in"]
        assert came == [f"r{spare}"], "and not the group that Ray Train starts again"

        assert await run.exit_code() == 0, "\n".join(run.lines[-60:])
        assert [len(run.starts(one, rank)) for one in (other, spare) for rank in range(2)] == [1] * 4
        ends = ends_of_ranks(run)
        assert ends.keys() >= {(str(one), str(rank)) for one in (other, spare) for rank in range(2)}
        assert len(set(ends.values())) == 1, "equal weights"


@pytest.mark.timeout(3600)
async def test_groups_come_and_go_with_nodes_and_two_that_die_at_once_start_again_together() -> None:
    """Slow: a Ray cluster of up to three nodes, and ten workers that import Ray and torch."""
    async with Run(2, "train_ray_groups.py", CPUS="2", LEAST="2", MOST="6") as run:

        def lives() -> list[int]:
            return [len(run.starts(group, rank)) for group in range(3) for rank in range(2)]

        await run.until(lambda: all(run.step(group, groups=2) for group in range(2)), "two groups have room")
        lighthouse = run.starts(0, 0)[0][2]
        run.say("add")
        await ask(lighthouse, "PATCH", min_replicas=3)  # they wait for the new group, however long its imports take
        await run.until(lambda: all(run.step(group) for group in range(3)), "a third group trains too")
        assert lives() == [1] * 6, "the others did not start again"

        await ask(lighthouse, "PATCH", min_replicas=1)
        for group in (1, 2):
            os.kill(run.starts(group, 1)[0][0], signal.SIGKILL)
        await run.until(lambda: run.step(0, groups=1), "the first group goes on")
        await ask(lighthouse, "PATCH", min_replicas=3)
        before = run.step(0, groups=1)
        await run.until(lambda: min(run.step(group) for group in range(3)) > before, "the two have started and healed")
        assert lives() == [1, 1, 2, 2, 2, 2]

        await ask(lighthouse, "PATCH", min_replicas=1)
        run.say(f"end {run.starts(2, 0)[-1][1]}")
        before = run.step(0)
        await run.until(lambda: min(run.step(group, groups=2) for group in range(2)) > before, "two train on")
        assert await run.exit_code() == 0, "\n".join(run.lines[-60:])
        equal_ends(run, 4)
