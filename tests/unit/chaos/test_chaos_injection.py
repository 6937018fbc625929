"""Faults on a real process: each is undone, also if the command ends in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep_cli.asking.rest import Lighthouse
from keepstep_cli.chaos import full_disk, network, process_table
from keepstep_cli.chaos.injection import Injector, Permissions, available, unavailable
from keepstep_cli.chaos.targets import Place, Places
from keepstep_cli.chaos.vocabulary import KINDS, Fault, Role, Target

SERVICE = Target(Role.RELAY, "127.0.0.1:1")


def started(process: subprocess.Popen[bytes]) -> process_table.Program:
    """The program of a process, once it has exec'd."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError):
            if (program := process_table.program_of(process.pid)).argv == ("sleep", "60"):
                return program
        time.sleep(0.01)  # nothing tells another process that it has exec'd
    raise TimeoutError("sleep did not start")


@pytest.fixture
def place() -> Iterator[Place]:
    process = subprocess.Popen(["sleep", "60"])
    place = Place(SERVICE, [process.pid], url="http://127.0.0.1:1", program=started(process))
    try:
        yield place
    finally:
        for pid in place.pids:
            subprocess.run(["kill", "-KILL", str(pid)], check=True)
        process.wait(10)


def injector(place: Place, folder: Path) -> Injector:
    places = Places("job")
    places.add(place)
    return Injector(places, Lighthouse("http://127.0.0.1:1", None), folder)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def becomes(pid: int, states: str) -> bool:
    """Whether the process reaches one of these states of /proc within 10 s."""
    deadline = time.monotonic() + 10
    while state(pid) not in states and time.monotonic() < deadline:  # noqa: ASYNC110 - the kernel tells only its parent
        await asyncio.sleep(0.01)
    return state(pid) in states


@pytest.mark.parametrize("kind", ["freeze", "slow"])
async def test_a_process_runs_again_after_an_interrupted_fault(place, tmp_path, kind):
    act = asyncio.create_task(injector(place, tmp_path).inject(Fault(1, KINDS[kind], SERVICE, 60.0)))
    assert await becomes(place.pids[0], "T")
    act.cancel()
    await asyncio.wait([act])
    assert await becomes(place.pids[0], "RS")


async def test_a_killed_service_is_started_again_with_its_command_line(place, tmp_path):
    before = place.pids[0]
    one = injector(place, tmp_path)
    await one.inject(Fault(1, KINDS["kill"], SERVICE, 0.0))
    one.close()
    assert not process_table.alive(before)
    assert place.pids != [before]
    async with asyncio.timeout(10):
        started = Path("/proc") / str(place.pids[0]) / "cmdline"
        while started.read_bytes() != b"sleep\0" + b"60\0":  # noqa: ASYNC110 - no event says that it has exec'd
            await asyncio.sleep(0.01)
    (child,) = one._started
    child.kill()
    child.wait(10)
    place.pids = []


def test_kinds_that_cannot_hit_a_service_have_a_reason(place, tmp_path):
    reasons = unavailable(place, Permissions())
    assert set(reasons) == {"kill", "restart", "cut", "cut-in", "cut-out", "fill-disk"}
    assert "--restart-services" in reasons["kill"]
    assert available(place, Permissions(restart_services=True)) == ["kill", "freeze", "slow", "restart"]
    assert network.why_not(place.pids[0])


async def test_a_command_that_ends_does_not_wait_until_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(full_disk, "PIECES", (1,))  # it would take days
    folder = process_table.Program(("--data-dir", str(tmp_path)), {}, str(tmp_path))
    place = Place(SERVICE, [os.getpid()], program=folder)
    filling = asyncio.create_task(injector(place, tmp_path).inject(Fault(1, KINDS["fill-disk"], SERVICE, 60.0)))
    async with asyncio.timeout(20):
        while not (tmp_path / full_disk.NAME).exists():  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.01)
        filling.cancel()
        await asyncio.wait([filling])
    assert not (tmp_path / full_disk.NAME).exists()


def test_only_a_small_filesystem_of_its_own_is_filled(tmp_path):
    assert full_disk.why_not(None, shared=True) == "it has no data directory"
    assert "--fill-shared-disks" in full_disk.why_not(Path("/usr"), shared=False)
    assert full_disk.why_not(tmp_path, shared=True) is None
