"""Faults on a real process: each is undone, also if the command ends in the middle of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from keepstep_chaos.engine import Duration, Engine
from keepstep_chaos.injecting import exhausting, inside, network
from keepstep_chaos.injecting.injection import InjectionError, Injector, Permissions, available, unavailable
from keepstep_chaos.observing import process_table
from keepstep_chaos.observing.targets import Place, Places
from keepstep_chaos.recovery import Recovery
from keepstep_chaos.schedule import Limits, Schedule
from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target
from keepstep_cli.asking.rest import Lighthouse

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
        process.wait(60)


def injector(place: Place, folder: Path) -> Injector:
    places = Places("job")
    places.add(place)
    return Injector(places, Lighthouse("http://127.0.0.1:1", None), folder)


def end_started(injector: Injector, place: Place) -> None:
    """End the one process that the injector started."""
    (child,) = injector._started
    child.kill()
    child.wait(60)
    place.pids = []


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
    async with asyncio.timeout(60):
        started = Path("/proc") / str(place.pids[0]) / "cmdline"
        while started.read_bytes() != b"sleep\0" + b"60\0":  # noqa: ASYNC110 - no event says that it has exec'd
            await asyncio.sleep(0.01)
    end_started(one, place)


def test_kinds_that_cannot_hit_a_service_have_a_reason(place, tmp_path):
    reasons = unavailable(place, Permissions())
    from_root = {"cut", "cut-in", "cut-out", "loss", "delay", "throttle"}
    assert set(reasons) == {"kill", "restart", "memory", "fill-disk", "gil", "clock"} | from_root
    assert "--restart-services" in reasons["kill"]
    assert available(place, Permissions(restart_services=True)) == ["kill", "freeze", "slow", "restart", "memory"]
    assert network.why_not(place.pids[0])


async def test_a_command_that_ends_does_not_wait_until_the_disk_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(exhausting, "PIECES", (1,))  # it would take days
    folder = process_table.Program(("--data-dir", str(tmp_path)), {}, str(tmp_path))
    place = Place(SERVICE, [os.getpid()], program=folder)
    filling = asyncio.create_task(injector(place, tmp_path).inject(Fault(1, KINDS["fill-disk"], SERVICE, 60.0)))
    async with asyncio.timeout(60):
        while not (tmp_path / exhausting.NAME).exists():  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.01)
        filling.cancel()
        await asyncio.wait([filling])
    assert not (tmp_path / exhausting.NAME).exists()


def test_only_a_small_filesystem_of_its_own_is_filled(tmp_path):
    assert exhausting.why_not(None, shared=True) == "it has no data directory"
    assert "--fill-shared-disks" in exhausting.why_not(Path("/usr"), shared=False)
    assert exhausting.why_not(tmp_path, shared=True) is None


# ---- faults inside a process, and limits from outside


@pytest.fixture
def obedient(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that accepts faults. For each line of input, it prints its clock, and the bytes that it could get."""
    program = (
        "import sys, time\n"
        "from keepstep_mesh.faults import accepting_faults\n"
        "with accepting_faults():\n"
        "    for line in sys.stdin:\n"
        "        try: got = len(bytearray(64 << 20))\n"
        "        except MemoryError: got = 0\n"
        "        print(time.time(), got, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "KEEPSTEP_CHAOS": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        told(process)  # it is ready
        yield process
    finally:
        process.communicate(timeout=20)
        assert not list(tmp_path.glob("*.sock"))


def told(process: subprocess.Popen[str]) -> tuple[float, int]:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    clock, got = process.stdout.readline().split()
    return float(clock), int(got)


async def test_a_process_brings_ordered_faults_on_itself_and_undoes_those_that_are_interrupted(obedient, tmp_path):
    place = Place(SERVICE, [obedient.pid], url="http://127.0.0.1:1")
    assert inside.why_not(place.pids) is None
    assert "KEEPSTEP_CHAOS" in str(inside.why_not([1]))
    one = injector(place, tmp_path)

    clock = asyncio.create_task(one.inject(Fault(1, KINDS["clock"], SERVICE, 60.0)))
    async with asyncio.timeout(60):
        while told(obedient)[0] < time.time() + 3000:  # noqa: ASYNC110 - no event says that a clock has jumped
            await asyncio.sleep(0.01)
        clock.cancel()
        await asyncio.wait([clock])
        while told(obedient)[0] > time.time() + 3000:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)

    locked = asyncio.create_task(one.inject(Fault(2, KINDS["gil"], SERVICE, 0.5)))
    began = time.monotonic()
    await locked
    assert time.monotonic() - began >= 0.5

    with pytest.raises(InjectionError, match="kind 'nan' is not possible in this process; possible kinds: gil, clock"):
        await one.inject(Fault(3, KINDS["nan"], SERVICE, 0.0))


async def test_a_process_gets_no_more_memory_for_a_time(obedient, tmp_path):
    place = Place(SERVICE, [obedient.pid], url="http://127.0.0.1:1", local="relay")  # one that is started again
    assert told(obedient)[1] == 64 << 20
    act = asyncio.create_task(injector(place, tmp_path).inject(Fault(1, KINDS["memory"], SERVICE, 60.0)))
    async with asyncio.timeout(60):
        while told(obedient)[1]:  # noqa: ASYNC110 - no event tells that the limit is set
            await asyncio.sleep(0.01)
        act.cancel()
        await asyncio.wait([act])
    assert told(obedient)[1] == 64 << 20


async def test_a_service_that_ends_some_time_after_it_had_no_memory_is_started_again_once(place, tmp_path):
    before, one = place.pids[0], injector(place, tmp_path / "results")
    await one.inject(Fault(1, KINDS["memory"], SERVICE, 0.0))
    assert not one.start_ended()
    assert place.pids == [before]

    os.kill(before, signal.SIGKILL)
    assert await becomes(before, "Z")
    assert not one.start_ended([SERVICE]), "a fault that acts on it may start it"
    (line,) = one.start_ended()
    assert "cannot be started" in line, "the folder of its log is missing"
    assert not one.start_ended()
    (tmp_path / "results").mkdir()
    (line,) = one.start_ended()
    assert line.startswith("relay 127.0.0.1:1 ended")
    assert process_table.alive(place.pids[0])

    end_started(one, place)
    assert not one.start_ended(), "it had all the memory that it wanted"


async def test_a_run_that_is_interrupted_starts_a_service_again_that_ended_without_memory(place, tmp_path):
    places, recovery = Places("job"), Recovery([SERVICE], 0, began=time.time())
    places.add(place)
    schedule = Schedule(5, [SERVICE], {SERVICE: ["memory"]}, Limits(min_groups=0, mean_seconds_between=0.1))
    said: list[str] = []
    engine = Engine(places, schedule, recovery, Lighthouse("http://127.0.0.1:1", None), [], tmp_path, said.append)
    run = asyncio.create_task(engine.run(Duration(seconds=60.0, faults=0, wedge_seconds=60.0)))
    async with asyncio.timeout(60):
        while not recovery.acting:  # noqa: ASYNC110 - no event says it
            await asyncio.sleep(0.01)
    os.kill(place.pids[0], signal.SIGKILL)
    assert await becomes(place.pids[0], "Z")
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert process_table.alive(place.pids[0])
    assert "interrupted" in said[0], "the fault of this seed takes 3.3 s"
    assert "was started again" in said[1]
    end_started(engine._injector, place)


def test_a_queue_that_the_kernel_does_not_have_is_named(monkeypatch):
    monkeypatch.setattr(network, "_has", lambda queue: queue != "netem")
    assert network.why_no_queue("throttle") is None
    assert network.why_no_queue("loss") == "this kernel has no queue netem; load its module: modprobe sch_netem"
