"""A real job whose groups, and whose lighthouse, tell a real metrics service what they do."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import Any

import pytest

from tests.support.jobs.job import DEADLINE, Job
from tests.support.services.metrics_driver import client, following, metrics_process
from tests.support.services.relay_driver import metric, relay_process

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]


def by_name(answer: dict[str, Any]) -> dict[str, Any]:
    return {one["name"]: one for one in answer["groups"]}


async def test_a_kill_and_its_recovery_stand_in_the_timeline_and_in_the_failures() -> None:
    began = time.time()
    async with Job() as job, metrics_process("--lighthouse", job.address) as (_, url), client(url) as asking:
        a, b = await job.start("a"), await job.start("b")
        await job.advance(a, b)
        told = await asking.until(
            "now",
            lambda now: (
                now["participants"] == ["a", "b"]
                and [(one["state"], one["step"] > 0) for one in now["groups"]] == [("training", True)] * 2
            ),
            "default",
        )
        assert all(one["loss"] > 0 and one["step_seconds_p50"] > 0 for one in told["groups"])

        async with following(asking, "default") as news:
            b.kill(number=signal.SIGKILL)
            async with asyncio.timeout(DEADLINE):
                lost = await anext(said async for kind, said in news if kind == "event" and said["event"] == "lost")
        assert lost["sentence"].startswith("b was lost: ")
        await job.advance(a)
        assert by_name(await asking.get("now", "default"))["b"]["state"] == "lost"
        await job.start("b")
        await job.advance(a, b)

        (failure,) = (
            await asking.until("failures", lambda of: of["failures"] and of["failures"][0]["recovered_at"], "default")
        )["failures"]
        assert failure["name"] == "b"
        assert 0 < failure["seconds_to_commit"] <= failure["seconds_to_return"]

        # Now and then it waits for the quorum when it is asked about; and in a picture of an hour a second is no span.
        line = by_name(
            await asking.until(
                f"timeline?points=5000&since={began}",
                lambda it: by_name(it)["b"]["spans"][-1][2] == "training",
                "default",
            )
        )
        states = [state for _, _, state in line["b"]["spans"]]
        assert states.index("training") < states.index("lost") < len(states) - 1
        assert "lost" not in [state for _, _, state in line["a"]["spans"]]
        for one in line.values():
            assert sum(one["shares"].values()) == pytest.approx(1)
            assert one["shares"]["training"] > 0
        healed = (await asking.get("transfers", "default"))["transfers"][0]
        assert (healed["kind"], healed["name"], healed["error"]) == ("heal", "b", "")
        assert healed["ended"] >= healed["began"]
        assert healed["bytes_done"] > 0
        assert 0 < (await asking.get("goodput", "default"))["goodput"] < 1
        assert job.assert_identical() > 0


async def test_live_state_that_went_through_two_relays_is_told_as_an_upload_to_each_of_its_part() -> None:
    async with Job("--initial-replicas", "2") as job, metrics_process("--lighthouse", job.address) as (_, url):
        flags = ("--lighthouse", job.address, "--name")
        async with (
            relay_process(*flags, "east") as (_, east),
            relay_process(*flags, "west") as (_, west),
            client(url) as asking,
        ):
            async with asyncio.timeout(DEADLINE):
                for relay in (east, west):
                    while not await metric(relay, "registered"):  # noqa: ASYNC110 - nothing to wait on
                        await asyncio.sleep(0.02)
            a, b = [await job.start(name, TRAINER_WIDTH="12000") for name in ("a", "b")]  # two chunks of state
            await job.advance(a, b)
            b.kill()
            await job.start("b", TRAINER_WIDTH="12000")
            await job.advance(a, b)

            def of_the_last_heal(told: dict[str, Any]) -> list[dict[str, Any]]:
                ended = [one for one in told["transfers"] if one["ended"]]
                step = max((one["step"] for one in ended if one["kind"] == "heal"), default=0)
                return [one for one in ended if one["step"] == step > 0]

            told = await asking.until("transfers", lambda it: len(of_the_last_heal(it)) == 3, "default")
            heal, *parts = sorted(of_the_last_heal(told), key=lambda one: one["via"] in ("east", "west"))
            assert (heal["kind"], heal["name"], heal["via"]) == ("heal", "b", "relay")
            assert {(one["kind"], one["via"], one["error"]) for one in parts} == {
                ("upload", "east", ""),
                ("upload", "west", ""),
            }
            assert sum(one["bytes_done"] for one in parts) == parts[0]["bytes_total"] == heal["bytes_done"]
