"""Real processes end in different ways: the lighthouse says why, with the facts of `keepstep run`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from keepstep_mesh.exit_codes import EXIT_HUNG, EXIT_PREFLIGHT
from tests.support.jobs.job import HANGING, Job
from tests.support.network.namespaces import Namespaces, why_not
from tests.support.processes.forked import FORKS
from tests.support.processes.memory_limit import memory_limit, why_no_limit
from tests.support.services.command import Command, environment

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

DEADLINE = 120.0
JOB = f"incidents-{os.getpid()}"
"""Orders such as `keepstep restart` reach all runs of a job on this machine."""


class Run:
    """`keepstep run` with two groups and a lighthouse of its own. ``order`` makes group 1 end in some way."""

    def __init__(
        self, folder: Path, *flags: str, ranks: int = 1, prefix: tuple[str, ...] = (), **variables: str
    ) -> None:
        self._order = folder / "order"
        count = ("--job", JOB, "--replicas", "2", "--nproc-per-replica", str(ranks))
        variables = {"TRAINER_HANG": str(self._order), FORKS: "1", **variables}
        self.command = Command(
            folder, "run", *count, *flags, "--", str(HANGING), deadline=DEADLINE, prefix=prefix, **variables
        )
        self.lighthouse = self.command.wait_for(r"(http://127\.0\.0\.1:\d+); ask it")[1]

    def trains(self) -> int:
        """Wait until rank 0 of r1 has committed its next steps, and return its process."""
        return int(self.command.wait_for(r'r1/0\].*"committed", "pid": (\d+)', times=6)[1])

    def order(self, kind: str) -> None:
        self._order.write_text(f"{kind} 1")

    def verdict(self, words: str) -> str:
        """Wait for the verdict on r1."""
        said = self.command.wait_for(rf"^\[r1\] why it ended: .*{words}.*$")
        return said[0].removeprefix("[r1] why it ended: ")

    def asked(self, *arguments: str) -> Any:
        return asked(self.lighthouse, *arguments)

    def newest(self) -> Any:
        """Return the newest incident, with its log."""
        return self.asked("incidents", str(self.asked("incidents")["incidents"][0]["id"]))


def asked(lighthouse: str, *arguments: str) -> Any:
    """Return what a command prints as JSON."""
    told = subprocess.run(
        [sys.executable, "-m", "keepstep_cli", *arguments, "--json", "--job", JOB, "--lighthouse", lighthouse],
        env=environment(),
        check=True,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    return json.loads(told.stdout)


@contextmanager
def running(folder: Path, *flags: str, ranks: int = 1, **variables: Any) -> Iterator[Run]:
    run = Run(folder, *flags, ranks=ranks, **variables)
    try:
        yield run
    except BaseException:  # a limit of the test, too
        print("\n".join(run.command.lines[-200:]))
        raise
    finally:
        run.command.close()


def test_exceptions_and_exit_codes_are_faults_of_the_script(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.trains()
        run.order("raise")
        run.verdict(r"script: rank 0 exited with 1; ValueError: bad batch \(hanging_trainer\.py:\d+ hang\)$")
        raised = run.newest()
        assert (raised["verdict"], raised["code"], raised["name"]) == ("script", 1, "r1")
        assert raised["replica_id"].startswith("r1:")
        assert raised["host"] == socket.gethostname()
        assert "ValueError: bad batch" in raised["log"]
        assert any('"committed"' in line for line in raised["log"])

        run.trains()
        run.order("exit")
        run.verdict(r"script: rank 0 exited with 7; (it printed no exception|.* ended .*with exit code 7)")

        assert [one["code"] for one in run.asked("incidents")["incidents"]] == [7, 1]


def test_signals_have_their_verdicts(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.trains()
        run.order("crash")
        run.verdict(r"script: rank 0 was killed by SIGSEGV; native code of the script or of a library crashed$")
        assert run.newest()["code"] == -signal.SIGSEGV

        os.kill(run.trains(), signal.SIGKILL)
        run.verdict(r"unknown: rank 0 was killed by SIGKILL; no launcher sent that; kills because memory ran out: ")

        os.kill(run.trains(), signal.SIGTERM)
        run.verdict(r"preemption: SIGTERM reached it, and neither keepstep nor its launcher had sent it$")

        found = run.asked("incidents")["incidents"]
        assert [one["verdict"] for one in found] == ["preemption", "unknown", "script"]
        assert run.asked("jobs")["jobs"][0]["incident"]["verdict"] == "preemption"


def test_the_rank_that_ended_first_is_named_with_the_others(tmp_path: Path) -> None:
    with running(tmp_path, ranks=2) as run:
        run.trains()
        second = int(run.command.wait_for(r'r1/1\].*"committed", "pid": (\d+)')[1])
        os.kill(second, signal.SIGKILL)
        said = run.verdict("unknown: rank 1 was killed by SIGKILL")
        # 1: the exception of its collective came before keepstep or its launcher ended it
        assert re.search(r"killed by SIGKILL: rank 0 (exited with (1|75)|was killed by SIGTERM)", said), said


@pytest.mark.skipif(why_no_limit() is not None, reason=str(why_no_limit()))
def test_a_kill_of_the_kernel_for_lack_of_memory_is_recognized(tmp_path: Path) -> None:
    with memory_limit(2 << 30) as prefix, running(tmp_path, prefix=prefix) as run:
        run.trains()
        run.order("memory")
        said = run.verdict(
            "out of memory: rank 0 was killed by SIGKILL; the kernel killed a process because memory ran out"
        )
        assert "/memory." in said
        assert run.newest()["oom_kills"] == 1


def test_a_hang_is_a_fault_of_the_script_and_has_its_stacks(tmp_path: Path) -> None:
    with running(tmp_path, "--hang-after", "4") as run:
        run.trains()
        run.order("lock")
        run.verdict(
            rf"script: rank 0 exited with {EXIT_HUNG}; it hangs: r1:.* rank 0 waits in hanging_trainer.py:\d+ lock"
        )
        newest = run.newest()
        assert any("lock.acquire" in stack["line"] for stack in newest["stacks"])
        assert any(" in hang" in line for line in newest["log"])


def test_a_machine_that_fails_its_checks_is_blamed_before_its_group_connects(tmp_path: Path) -> None:
    check = 'command=test "$REPLICA_GROUP_ID" = 0 || { echo fan is off; exit 3; }'
    with running(tmp_path, "--check-with", check, "--check-pause", "600") as run:
        said = run.verdict(rf"machine: rank 0 exited with {EXIT_PREFLIGHT}; this machine may not join the job: host ")
        assert "exit code 3: fan is off" in said
        assert run.newest()["replica_id"] == "r1"


def test_sigterm_to_the_launcher_of_one_machine_is_a_preemption(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.trains()
        flags = (
            "--job",
            JOB,
            "--replicas",
            "1",
            "--first-replica",
            "2",
            "--replicas-in-job",
            "3",
            "--lighthouse",
            run.lighthouse,
        )
        none = str(tmp_path / "none")
        more = Command(
            tmp_path, "run", *flags, "--", str(HANGING), deadline=DEADLINE, TRAINER_HANG=none, **{FORKS: "1"}
        )
        try:
            more.wait_for(r'r2/0\].*"committed"')
            more.process.send_signal(signal.SIGTERM)
            assert more.wait() == 128 + signal.SIGTERM
        finally:
            more.close()
        [newest] = run.asked("incidents")["incidents"]
        assert (newest["name"], newest["verdict"]) == ("r2", "preemption")
        assert "SIGTERM reached its launcher" in newest["evidence"]


def test_ends_that_an_operator_orders_are_no_incidents(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        run.trains()
        subprocess.run(
            [sys.executable, "-m", "keepstep_cli", "restart", "r1", "--job", JOB],
            env=environment(),
            check=True,
            timeout=DEADLINE,
        )
        run.command.wait_for("started again")
        run.trains()
        subprocess.run(
            [
                sys.executable,
                "-m",
                "keepstep_cli",
                "evict",
                "r1",
                "--yes",
                "--job",
                JOB,
                "--lighthouse",
                run.lighthouse,
            ],
            env=environment(),
            check=True,
            timeout=DEADLINE,
        )
        run.command.wait_for("started again")
        os.kill(run.trains(), signal.SIGKILL)
        run.verdict("unknown: rank 0 was killed by SIGKILL")
        assert len(run.asked("incidents")["incidents"]) == 1, "the first one"


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_cut_network_and_a_machine_that_vanishes_are_told_apart(tmp_path: Path) -> None:
    with Namespaces() as network, ExitStack() as stack:
        place = network.host("lighthouse")
        address = f"http://{place.address}:29510"

        def started(host: str, *arguments: str) -> Command:
            prefix = (
                *network.host(host).command,
                "unshare",
                "--uts",
                "sh",
                "-c",
                f'hostname {host} && exec "$@"',
                "sh",
            )
            none = str(tmp_path / "none")
            command = Command(tmp_path, *arguments, deadline=DEADLINE, prefix=prefix, TRAINER_HANG=none)
            stack.callback(command.close)
            return command

        def group(number: int) -> Command:
            flags = ("--job", JOB, "--replicas", "1", "--first-replica", str(number), "--replicas-in-job", "2")
            return started(f"h{number}", "run", "--cold", *flags, "--lighthouse", address, "--", str(HANGING))

        def verdict_on_r1(verdict: str) -> Any:
            """Wait until the newest incident of r1 has this verdict."""
            deadline = time.monotonic() + DEADLINE
            while time.monotonic() < deadline:
                found = [one for one in asked(address, "incidents")["incidents"] if one["name"] == "r1"]
                if found and found[0]["verdict"] == verdict:
                    return found[0]
            raise AssertionError(f"no verdict {verdict!r} on r1")

        started(
            "lighthouse", "lighthouse", "--bind", f"{place.address}:29510", "--insecure", "--heartbeat-timeout", "2"
        )
        first, second = group(0), group(1)
        first.wait_for(r'r0/0\].*"committed"', times=6)
        network.cut("h1", "lighthouse")
        first.wait_for("member lost")
        network.mend()
        cut = verdict_on_r1("network")
        assert cut["evidence"] == ["it was silent for 2 s", "the same process has connected again"]
        assert cut["host"] == "h1"
        second.wait_for(r'r1/0\].*"committed"', times=6)
        network.unplug("h1")
        gone = verdict_on_r1("machine")
        assert gone["replica_id"] == cut["replica_id"], "the same process"
        assert "its machine or link is down" in gone["evidence"][1]


async def test_an_exception_within_a_step_is_known_without_a_launcher() -> None:
    async with Job() as job:
        order = job.directory / "order"
        a, b = await job.start("a", TRAINER_HANG=str(order)), await job.start("1", TRAINER_HANG=str(order))
        await job.advance(a, b, steps=6)
        order.write_text("late 1")
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(DEADLINE):
            while not found:
                await asyncio.sleep(0.2)  # the lighthouse waits for a launcher
                found = (await job.order("GET", "/incidents"))["incidents"]
        assert (found[0]["verdict"], found[0]["exit"]) == ("script", "")
        assert "rank 0 ended in the middle of a step with ValueError: bad batch" in found[0]["evidence"][0]
        await job.advance(a)
