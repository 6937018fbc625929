"""A real job that exports its spans and logs to a collector, which decodes the real messages."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import pytest

from keepstep_mesh.telemetry.tracing.spans import SPAN_GROUPS
from tests.support.jobs.job import DEADLINE, Job
from tests.support.services.otlp_collector import Collector, collector
from tests.support.services.relay_driver import metric, relay_process

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs keepstep[otel]")
pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]


def groups_by_trace(spans: list[dict[str, Any]]) -> dict[str, set[str]]:
    """Return the groups whose committed step is in each trace."""
    found: dict[str, set[str]] = {}
    for one in spans:
        if one["name"] == "step" and one.get("keepstep.committed"):
            found.setdefault(one["trace"], set()).add(one["resource"]["keepstep.group"])
    return found


async def test_a_kill_and_a_heal_stand_in_the_traces_of_all_groups_and_in_the_logs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts a relay, two groups, and one of them again: about 8 s."""
    async with collector() as collected:
        monkeypatch.setenv("KEEPSTEP_OTEL", "all")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=lab")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        async with (
            Job() as job,
            relay_process("--lighthouse", job.address, "--name", "east", KEEPSTEP_OTEL="heal,logs") as (_, east),
        ):
            async with asyncio.timeout(DEADLINE):
                while not await metric(east, "registered"):  # noqa: ASYNC110 - nothing to wait on
                    await asyncio.sleep(0.02)
            trainer = {"TRAINER_LOG": "info", "TRAINER_WIDTH": "12000"}
            a, b = [await job.start(name, **trainer) for name in ("a", "b")]
            await job.advance(a, b)
            b.kill(number=signal.SIGKILL)
            await job.advance(a)
            await job.start("b", **trainer)
            await job.advance(a, b)

            def ended(it: Collector) -> dict[str, Any] | None:
                heals = [one for one in it.spans if one["name"] == "heal" and not one["error"]]
                steps = {one["id"] for one in it.spans if one["name"] == "step"}
                return next((one for one in heals if "a" in one["keepstep.source"] and one["parent"] in steps), None)

            heal = await collected.until(ended)
            await collected.until(lambda it: {"a", "b"} in groups_by_trace(it.spans).values())
            healed = await collected.until(
                lambda it: next((o for o in it.logs if (o["body"], o["id"]) == ("healed", heal["parent"])), None)
            )
            upload = await collected.until(lambda it: next((one for one in it.spans if one["name"] == "upload"), None))
            reported = await collected.until(
                lambda it: next((one for one in it.logs if one["event"] == "keepstep.lost"), None)
            )
        assert job.assert_identical() > 0

    spans = collected.spans
    assert {one["name"] for one in spans} == {*SPAN_GROUPS, "upload"}
    steps = {one["id"]: one for one in spans if one["name"] == "step"}
    for one in spans:
        if one["name"] != "step" and one["parent"] in steps:
            parent = steps[one["parent"]]
            assert one["trace"] == parent["trace"]
            assert one["resource"] == parent["resource"]
            assert parent["began"] <= one["began"] <= one["ended"]
    assert heal["keepstep.bytes"] > 0
    assert heal["keepstep.via"]
    committed = [one for one in steps.values() if one.get("keepstep.committed")]
    assert all(one["keepstep.value.loss"] > 0 and not one["status"] for one in committed)
    assert len({one["trace"] + one["id"] for one in spans}) == len(spans)

    resource = heal["resource"]
    assert (resource["service.name"], resource["keepstep.job"], resource["keepstep.rank"]) == (
        "keepstep-trainer", "default", 0,
    )  # fmt: skip
    assert resource["keepstep.replica_id"].startswith("b:")
    assert resource["deployment.environment.name"] == "test"
    assert all(headers["x-tenant"] == "lab" for headers in collected.headers)

    assert (upload["resource"]["service.name"], upload["keepstep.job"]) == ("keepstep-relay", "default")
    assert upload["keepstep.bytes_done"] > 0
    assert reported["resource"]["service.name"] == "keepstep-lighthouse"
    assert reported["keepstep.replica_id"].startswith("b:")
    assert (healed["trace"], healed["keepstep.source"]) == (heal["trace"], heal["keepstep.source"])
    assert healed["severity"] == "INFO"
