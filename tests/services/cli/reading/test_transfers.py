"""`keepstep transfers`, as a process: heals of a real lighthouse, uploads of a real relay that is registered there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import sys
import termios
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from keepstep_mesh.protocol.messages import Healing
from keepstep_mesh.protocol.policy import Policy
from tests.services.cli.scene import keepstep
from tests.support.network.ports import free_port
from tests.support.services.command import environment, process
from tests.support.services.lighthouse_driver import Worker, lighthouse, worker
from tests.support.services.relay_driver import DEADLINE, client, relay_process, state

MIB = 1 << 20
HALF = Healing(50 * MIB, 100 * MIB, 12.5 * MIB, 7, "a:1", "relay", 4.0)
PATIENT = Policy(heartbeat_timeout=DEADLINE)
"""These workers send no heartbeats."""
THREE = state(1, 20 * MIB)
"""Three chunks: 8, 8 and 4 MiB."""


async def transfers(*arguments: str) -> str:
    said = await keepstep("transfers", "--job", "job", *arguments)
    assert said.code == 0, said.err
    return said.out


async def as_json(*arguments: str) -> Any:
    return json.loads(await transfers(*arguments, "--json"))


@asynccontextmanager
async def groups() -> AsyncIterator[tuple[tuple[str, str], list[Worker]]]:
    """How the lighthouse is found, and the groups a:1 and b:1 of the job."""
    async with lighthouse(policy=PATIENT) as one, worker(one.address, "a:1") as a, worker(one.address, "b:1") as b:
        yield ("--lighthouse", one.address), [a, b]


@asynccontextmanager
async def registered(at: tuple[str, str], name: str) -> AsyncIterator[str]:
    """A relay process that the lighthouse knows; its address."""
    async with relay_process("--lighthouse", at[1], "--name", name) as (_, address):
        async with asyncio.timeout(DEADLINE):
            while name not in [one["name"] for one in (await as_json(*at))["relays"]]:
                pass
        yield address


async def heals(member: Worker, at: tuple[str, str], told: Healing) -> dict[str, Any]:
    """The member says so; the look that has it."""
    await member.send(told)
    async with asyncio.timeout(DEADLINE):
        while not (found := await as_json(*at))["heals"]:
            pass
    return found


async def test_a_heal_is_shown_with_bytes_rate_and_time_left() -> None:
    async with groups() as (at, (_, b)):
        (one,) = (await heals(b, at, HALF))["heals"]
        assert one.pop("began_seconds_ago") >= 4.0
        assert one == {
            "replica_id": "b:1",
            "step": 7,
            "source": "a:1",
            "via": "relay",
            "bytes_done": 50 * MIB,
            "bytes_total": 100 * MIB,
            "bytes_per_second": 12.5 * MIB,
            "seconds_left": 4.0,
        }
        out = await transfers(*at)
        assert re.search(r" b:1 +7 +a:1 +relay +50% of 100\.0 MiB +12\.5 MiB/s +4 s ", out), out


async def test_a_heal_of_which_little_is_known_yet_is_shown_as_it_is() -> None:
    async with groups() as (at, (_, b)):
        await heals(b, at, Healing(0, 0, 0.0, 7))
        out = await transfers(*at)
        assert re.search(r" b:1 +7 +- +- +0 B +0 B/s +- ", out), out


async def test_uploads_are_shown_of_each_relay_with_what_is_there_of_all() -> None:
    async with groups() as (at, _), registered(at, "east") as east, registered(at, "west") as west:
        async with client(east) as one, client(west) as other:
            await one.store(state(2, 5000), "old", 1)
            await one.upload(THREE, "s7", 7, chunks=[0, 2])
            await other.begin("s8", 8, ranks=2)
        found = await as_json(*at)
        assert [(one["name"], one["trouble"]) for one in found["relays"]] == [("east", None), ("west", None)]
        first, second = found["uploads"]
        assert (first["relay"], first["id"], first["step"], first["state"]) == ("east", "s7", 7, "uploading")
        assert (first["bytes_done"], first["bytes_total"]) == (12 * MIB, len(THREE.pack))
        assert (second["relay"], second["id"], second["state"]) == ("west", "s8", "begun")
        assert (second["bytes_total"], second["seconds_left"]) == (0, None)
        out = await transfers(*at)
        assert re.search(r" east +s7 +7 +uploading +60% of 20\.0 MiB ", out), out
        assert re.search(r" west +s8 +8 +begun +0 B +0 B/s +- ", out), out


async def test_a_part_to_which_nothing_more_comes_is_no_upload() -> None:
    async with groups() as (at, _), registered(at, "east") as address, client(address) as uploader:
        await uploader.upload(THREE, "s7", 7, chunks=[0])
        assert [one["id"] for one in (await as_json(*at))["uploads"]] == ["s7"]
        done = await uploader.call("POST", f"{uploader.checkpoints}/s7/result", json={"part": True})
        assert (done["state"], done["lacking"], done["committed"]) == ("part", 2, None)
        assert (await as_json(*at))["uploads"] == []
        listed = await keepstep("checkpoint", "ls", "--job", "job", *at)
        assert re.search(r" s7 +7 +live +part ", listed.out), listed.out


async def test_the_rate_of_an_upload_is_that_of_the_last_seconds() -> None:
    async with groups() as (at, _), registered(at, "east") as address, client(address) as uploader:
        await uploader.upload(THREE, "s7", 7, chunks=[])
        assert (await as_json(*at))["uploads"][0]["bytes_per_second"] == 0
        await uploader.put(THREE.chunks[0])
        (one,) = (await as_json(*at))["uploads"]
        assert MIB < one["bytes_per_second"] < 100 * MIB, "8 MiB within some of the last 5 seconds"
        assert one["seconds_left"] == pytest.approx(12 * MIB / one["bytes_per_second"])


async def test_when_nothing_moves_it_is_said() -> None:
    async with groups() as (at, _):
        assert await transfers(*at) == "nothing moves: no heal in job job, no relay is registered\n"
        async with registered(at, "east"):
            assert await transfers(*at) == "nothing moves: no heal in job job, no upload to east\n"


async def test_a_relay_that_does_not_answer_is_named_and_the_rest_is_shown() -> None:
    async with groups() as (at, (_, b)):
        async with registered(at, "east") as address:
            pass  # killed, with its registration still there
        found = await heals(b, at, HALF)
        assert [one["replica_id"] for one in found["heals"]] == ["b:1"]
        (east,) = found["relays"]
        assert east["trouble"].startswith(f"{address}: ")
        assert f"relay east: {address}: " in await transfers(*at)


async def test_a_job_that_is_not_there_is_no_job_in_which_nothing_moves() -> None:
    async with lighthouse() as one:
        said = await keepstep("transfers", "--job", "job", "--lighthouse", one.address)
        assert said.code == 4
        assert "job 'job' not found" in said.err


async def test_follow_looks_again_until_it_is_interrupted() -> None:
    async with (
        groups() as (at, (_, b)),
        process("transfers", "--job", "job", *at, "--follow", "--json") as follower,
        asyncio.timeout(DEADLINE),
    ):
        assert json.loads(await follower.stdout.readline())["heals"] == []
        await b.send(HALF)
        while not (seen := json.loads(await follower.stdout.readline())["heals"]):
            pass
        assert seen[0]["bytes_done"] == 50 * MIB
        await b.send(Healing(100 * MIB, 100 * MIB, 20.0 * MIB, 7, "a:1", "relay", 5.0, ended=True))
        while json.loads(await follower.stdout.readline())["heals"]:
            pass
        follower.send_signal(signal.SIGINT)
        assert await follower.wait() == 0
        assert await follower.stderr.read() == b""


async def test_follow_waits_for_a_job_and_goes_on_at_the_next_lighthouse_that_answers() -> None:
    port = free_port()
    async with (
        lighthouse(policy=PATIENT) as first,
        process(
            *("transfers", "--job", "job", "--lighthouse", f"{first.address},http://127.0.0.1:{port}"),
            *("--follow", "--json"),
        ) as follower,
        asyncio.timeout(DEADLINE),
    ):
        assert b"job 'job' not found" in await follower.stderr.readline()
        async with worker(first.address, "b:1") as b:
            await b.send(HALF)
            while not json.loads(await follower.stdout.readline())["heals"]:
                pass
        await first.stop()
        assert b"no lighthouse answers" in await follower.stderr.readline()
        async with lighthouse(policy=PATIENT, bind=f"127.0.0.1:{port}") as second, worker(second.address, "c:1") as c:
            await c.send(HALF)
            while [one["replica_id"] for one in json.loads(await follower.stdout.readline())["heals"]] != ["c:1"]:
                pass


async def test_on_a_terminal_it_stays_in_its_place_with_a_bar() -> None:
    async with groups() as (at, (_, b)):
        await b.send(HALF)
        ours, theirs = pty.openpty()
        termios.tcsetwinsize(theirs, (24, 120))
        following = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "keepstep_cli", "transfers", "--job", "job", *at, "--follow"),
            stdout=theirs,
            env=environment(TERM="xterm"),
        )
        os.close(theirs)
        shown = b""
        try:
            async with asyncio.timeout(DEADLINE):
                # a bar, then the cursor moves up, then the same once more
                while not re.search(rb"\xe2\x94\x81.*50% of 100\.0 MiB(.|\n)*\x1b\[\d*A(.|\n)*50% of", shown):
                    shown += await asyncio.to_thread(os.read, ours, 4096)
                following.send_signal(signal.SIGINT)
                assert await following.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                following.kill()
            await following.wait()
            os.close(ours)


async def test_follow_without_a_terminal_prints_what_changed() -> None:
    async with (
        groups() as (at, (_, b)),
        process("transfers", "--job", "job", *at, "-f") as follower,
        asyncio.timeout(DEADLINE),
    ):
        assert (await follower.stdout.readline()).startswith(b"nothing moves")
        await b.send(HALF)
        while b"50% of 100.0 MiB" not in (line := await follower.stdout.readline()):
            assert not line.startswith(b"nothing moves")
