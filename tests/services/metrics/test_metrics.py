"""A metrics service as a server: what it took it keeps, whom it lets in, and that its description tells the truth."""

from __future__ import annotations

import asyncio
import io
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openapi_spec_validator
import pytest
from jsonschema import Draft202012Validator

from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.messages import Exposure, Heartbeat, ShardReport
from keepstep_mesh.protocol.policy import SETTINGS, Policy
from keepstep_mesh.protocol.telemetry_records import StepRecord
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.serving.service import all_routes
from keepstep_mesh.telemetry.record_sender import Sender
from keepstep_metrics.app import Metrics
from keepstep_metrics.settings import MetricsSettings, read_settings
from keepstep_relay.app import Relay
from keepstep_relay.core.events import Limits
from tests.support.services.access_table import ASKERS, TOKENS, check_access
from tests.support.services.lighthouse_driver import eventually, lighthouse, round_of, workers
from tests.support.services.metrics_driver import (
    DEADLINE,
    JOB,
    Client,
    Teller,
    client,
    event,
    following,
    metrics,
    metrics_process,
    step,
)
from tests.support.services.relay_driver import Client as RelayClient
from tests.support.services.relay_driver import client as relay_client
from tests.support.services.relay_driver import relay, state

JOB_PATH, ONE = "/v1/jobs/{job}", "/v1/jobs/{job}/replicas/{name}"
ALL = "worker service admin"
READS = ("now", "timeline", "steps", "goodput", "stragglers", "transfers", "failures", "events", "incidents")
ACCESS = {
    ("GET", "/healthz"): "anybody",
    ("GET", "/readyz"): "anybody",
    ("GET", "/openapi.json"): "anybody",
    ("GET", "/"): "anybody",
    ("GET", "/static/{file}"): "anybody",
    ("GET", "/static/vendor/{file}"): "anybody",
    ("GET", "/v1/whoami"): ALL,
    ("GET", "/metrics"): ALL,
    ("POST", "/v1/ingest"): ALL,
    ("GET", "/v1/jobs"): ALL,
    **{("GET", f"{JOB_PATH}/{read}"): ALL for read in READS},
    ("GET", JOB_PATH): ALL,
    ("PATCH", JOB_PATH): "admin",
    ("POST", f"{JOB_PATH}/verify"): "admin",
    ("POST", f"{ONE}/readmit"): "admin",
    ("POST", f"{ONE}/evict"): "admin",
    ("POST", f"{ONE}/drain"): "admin",
    ("POST", f"{ONE}/replace"): "admin",
    ("GET", "/v1/cluster"): ALL,
    ("GET", "/v1/stream"): ALL,
}


def url_of(path: str) -> str:
    return path.format(job=JOB, name="a", file="app.js")


def story(now: float) -> list[dict[str, Any]]:
    return [
        event(now - 60, "joined", "a:1", member=False),
        event(now - 50, "quorum", quorum_id=1, members=["a:1"]),
        event(now - 5, "lost", "a:1", reason="its connection ended", member=True),
        event(now - 4, "heal_began", "b:1", step=3, source="a:1"),
    ]


def test_the_table_has_every_route() -> None:
    routes = [(one.method, one.path) for one in all_routes(Metrics(MetricsSettings()).service())]
    assert sorted(routes) == sorted(ACCESS)


async def test_the_description_has_what_the_page_shows_of_each_field_of_a_policy() -> None:
    async with metrics() as one, client(one.address) as asking:
        known = (await asking.call("GET", "/openapi.json"))["components"]["schemas"]["Policy"]["properties"]
    assert {name: {**schema, **SETTINGS[name].schema()} for name, schema in known.items()} == known
    assert known.keys() == SETTINGS.keys()
    assert known["on_divergence"]["enum"] == ["heal", "drain", "report"]
    assert known["join_timeout"]["x-unit"] == "seconds"


@pytest.mark.parametrize("asker", ASKERS)
async def test_each_route_lets_in_whom_the_table_says_and_nobody_else(asker: str) -> None:
    async with metrics(tokens=TOKENS) as one:
        await check_access(ACCESS, asker, one.address, url_of)
        assert not one.core.jobs


async def test_the_description_is_openapi_and_every_answer_is_as_it_says() -> None:
    async with (
        lighthouse() as known,
        metrics(lighthouses=(known.address,)) as one,
        client(one.address) as asking,
    ):
        await eventually(lambda: one.is_registered)
        now = time.time()
        await asking.tell(Teller(), *story(now))
        await asking.tell(Teller("a:1"), *(step(now - 40 + at, at + 1, values={"loss": 1.0}) for at in range(30)))
        document = await asking.call("GET", "/openapi.json")
        openapi_spec_validator.validate(document)
        described = {(method.upper(), path) for path, of in document["paths"].items() for method in of}
        assert described == set(ACCESS)
        for schema in document["components"]["schemas"].values():
            schema.setdefault("additionalProperties", False)
        for (method, path), roles in ACCESS.items():
            operation = document["paths"][path][method.lower()]
            named = [of["name"] for of in operation.get("parameters", []) if of["in"] == "path"]
            assert named == re.findall(r"\{(\w+)\}", path)
            assert ("security" in operation) == (roles != "anybody")
            assert roles == "anybody" or path == "/metrics" or operation["x-roles"] == sorted(roles.split())
            if path == "/v1/stream":
                continue
            how: dict[str, Any] = {"data": io.BytesIO(Teller("a:1").batch())} if path == "/v1/ingest" else {}
            async with asking.http.request(method, one.address + url_of(path), **how) as answer:
                content = operation["responses"].get(str(answer.status), {}).get("content", {})
                if "application/json" in content:
                    schema = content["application/json"]["schema"]
                    Draft202012Validator({**schema, "components": document["components"]}).validate(await answer.json())
                elif content:
                    assert answer.content_type in (*content, "text/html", "text/javascript"), (method, path)
                elif answer.status >= 400:
                    assert answer.content_type == "application/problem+json", (method, path)
                else:
                    assert path in ("/healthz", "/readyz", "/openapi.json", "/metrics"), (method, path, answer.status)


async def test_acknowledged_records_survive_a_kill_and_count_once(tmp_path: Path) -> None:
    """With a snapshot made in the middle, and without."""
    workers, happens, now = Teller("a:1"), Teller(), time.time()
    batches = [workers.batch(*(step(now - 60 + 3 * at + of, 3 * at + of + 1) for of in range(3))) for at in range(10)]
    flags = ("--data-dir", str(tmp_path), "--snapshot-every")

    async def told(asking: Client) -> dict[str, Any]:
        paths = ("now", "timeline", "goodput", "failures", "events", "transfers")
        answers = {path: await asking.get(f"{path}?since={now - 100}&until={now}") for path in paths}
        del answers["now"]["t"], answers["now"]["steps_per_second"]  # they follow the clock
        return answers

    before: dict[str, Any] = {}
    for round_number, every in enumerate(("1h", "100ms", "1h")):
        async with metrics_process(*flags, every) as (process, url), client(url) as asking:
            if round_number:
                assert await told(asking) == before
            assert (await asking.tell(happens, *story(now))) == 4
            for body in batches[: 3 * (round_number + 1)]:
                await asking.call("POST", "/v1/ingest", data=body)
            if every == "100ms":
                journal = tmp_path / "metrics.sqlite-wal"
                size = journal.stat().st_size
                async with asyncio.timeout(DEADLINE):
                    while journal.stat().st_size == size:  # noqa: ASYNC110 - nothing tells it
                        await asyncio.sleep(0.05)
            before = await told(asking)
            assert before["goodput"]["steps_committed"] == 9 * (round_number + 1)
            assert [one["id"] for one in before["events"]["events"]] == [*range(1, 4 * (round_number + 1) + 1)]
            process.send_signal(signal.SIGKILL)
            await process.wait()


async def test_a_full_disk_is_said_and_nothing_that_was_taken_then_is_lost(tmp_path: Path) -> None:
    worker, now = Teller("a:1"), time.time()
    batches = [worker.batch(step(now - 60 + at, at + 1, reason="x" * 500)) for at in range(40)]
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:

        async def disk(pages: int) -> None:
            await one.store._in_thread(one.store._connection.execute, f"PRAGMA max_page_count = {pages}")

        await disk(12)  # SQLite's own limit: an insert fails as it does on a disk that is full
        taken = 0
        async with asking.http.post(f"{one.address}/v1/ingest", data=batches[0]) as answer:
            assert answer.status == 200
        for body in batches[1:]:
            async with asking.http.post(f"{one.address}/v1/ingest", data=body) as answer:
                taken += answer.status == 200
                if answer.status != 200:
                    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
                    assert "is full" in (await answer.json(content_type=None))["detail"]
                    break
        else:
            raise AssertionError("the disk was never full")
        await asking.call("GET", "/readyz", 503)
        await disk(100_000)
        for body in batches[taken + 1 :]:  # sent again, as a sender does
            async with asyncio.timeout(DEADLINE):
                while True:
                    async with asking.http.post(f"{one.address}/v1/ingest", data=body) as answer:
                        if answer.status == 200:
                            break
                    await asyncio.sleep(0.05)  # no event reports free room
        await asking.call("GET", "/readyz")
        before = await asking.get(f"goodput?since={now - 100}&until={now}")
    assert before["steps_committed"] == 40
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        assert await asking.get(f"goodput?since={now - 100}&until={now}") == before


async def test_events_are_forgotten_when_they_are_older_than_was_said(tmp_path: Path) -> None:
    async with metrics(data_dir=tmp_path, keep_events=30.0, snapshot_every=0.05) as one, client(one.address) as asking:
        now = time.time()
        await asking.tell(Teller(), event(now - 60, "joined", "a:1"), event(now, "lost", "a:1", reason="killed"))
        found = await asking.until("events", lambda it: len(it["events"]) == 1)
        assert [it["event"] for it in found["events"]] == ["lost"]


async def test_a_second_service_on_the_same_data_is_refused(tmp_path: Path) -> None:
    async with metrics(data_dir=tmp_path):
        with pytest.raises(Exception, match="use another --data-dir"):
            async with metrics(data_dir=tmp_path):
                pass


async def test_a_bad_batch_and_an_unknown_job_are_problems_that_say_what_to_do() -> None:
    async with metrics() as one, client(one.address) as asking:
        assert "msgpack" in (await asking.call("POST", "/v1/ingest", 400, data=b"\xc1"))["detail"]
        await asking.call("POST", "/v1/ingest", 413, data=io.BytesIO(b"x" * (2 << 20)))
        assert "known jobs: none" in (await asking.call("GET", f"/v1/jobs/{JOB}/now", 404))["detail"]
        await asking.tell(Teller("a:1"), step(time.time(), 1))
        for query in ("since=x", "until=nan", "since=10&until=5", "points=-1"):
            await asking.call("GET", f"/v1/jobs/{JOB}/timeline?{query}", 400)
        assert "--lighthouse" in (await asking.call("GET", "/v1/cluster", 503))["detail"]


async def test_a_stream_begins_with_now_goes_on_with_events_and_takes_up_where_it_was() -> None:
    async with metrics() as one, client(one.address) as asking:
        told, now = Teller(), time.time()
        await asking.tell(told, event(now, "joined", "a:1"))
        async with following(asking) as news:
            kind, view = await anext(news)
            assert (kind, [group["name"] for group in view["groups"]]) == ("now", ["a"])
            await asking.tell(told, event(now, "joined", "b:1"))
            kind, said = await anext(news)
            assert (kind, said["sentence"]) == ("event", "b joined")
            kind, view = await anext(news)
            assert [group["name"] for group in view["groups"]] == ["a", "b"]
        await asking.tell(told, event(now, "lost", "b:1", reason="killed"))
        async with following(asking, after=said["id"]) as news:
            assert (await anext(news))[1]["sentence"] == "b was lost: killed"
        assert [one["id"] for one in (await asking.get(f"events?since_id={said['id']}"))["events"]] == [3]


async def test_orders_go_to_the_lighthouse_with_the_token_of_who_asks() -> None:
    async with (
        lighthouse(tokens=TOKENS) as known,
        metrics(tokens=TOKENS, lighthouses=(known.address,)) as one,
        client(one.address, TOKENS.admin) as admin,
    ):
        await eventually(lambda: one.is_registered)
        said = await admin.call("POST", f"/v1/jobs/{JOB}/replicas/a/drain", 404, json={"reason": "x"})
        assert "not found" in said["detail"]  # the lighthouse's own answer
        found = await admin.call("GET", "/v1/cluster")
        assert [(it["address"], it["leader"]) for it in found["lighthouses"]] == [(known.address, True)]
        assert [(it["kind"], it["address"]) for it in found["services"]] == [("metrics", one.address)]
        assert found["store"] == "memory"


@asynccontextmanager
async def told_by_a_relay() -> AsyncIterator[tuple[Client, RelayClient, Relay]]:
    """A reader of a metrics service, and a relay that tells it."""
    async with (
        lighthouse() as known,
        metrics(lighthouses=(known.address,)) as service,
        client(service.address) as asking,
    ):
        await eventually(lambda: service.is_registered)  # so that the relay finds it when it registers itself
        async with (
            relay(lighthouses=(known.address,), name="east") as there,
            relay_client(there.address, job=JOB) as uploading,
        ):
            await eventually(lambda: there.registrar is not None and there.registrar.found == service.address)
            await asking.tell(Teller("a:1"), step(time.time(), 1))
            yield asking, uploading, there


async def test_an_upload_to_a_relay_is_seen_while_it_is_under_way_and_when_it_has_ended() -> None:
    one = state(1)
    async with told_by_a_relay() as (asking, uploading, _):
        await uploading.upload(one, chunks=[0, 1])
        told = (await asking.until("transfers", lambda it: it["transfers"]))["transfers"][0]
        assert (told["kind"], told["name"], told["via"], told["ended"]) == ("upload", "c1", "east", None)
        assert (told["bytes_done"], told["bytes_total"]) == (len(one.pack) - len(one.chunks[2]), len(one.pack))
        await uploading.put(one.chunks[2])
        await uploading.commit()
        (ended,) = (
            await asking.until("transfers", lambda it: [of["ended"] is None for of in it["transfers"]] == [False])
        )["transfers"]
        assert (ended["kind"], ended["name"], ended["via"], ended["error"]) == ("upload", "c1", "east", "")
        assert ended["bytes_done"] == ended["bytes_total"] == len(one.pack)
        assert told["began"] == ended["began"] < ended["ended"] <= time.time()
        assert ended["bytes_per_second"] > 0


async def test_members_of_a_model_that_exists_once_are_shown_with_their_keepers_exposure_and_copies() -> None:
    async with (
        lighthouse(policy=Policy(reconnect_grace=0.1)) as known,
        metrics(lighthouses=(known.address,)) as one,
        client(one.address) as asking,
        workers(known.address, 3) as (member, keeper, whole),
    ):
        await eventually(lambda: one.is_registered)
        (quorum, *_) = await round_of([member, keeper, whole])
        told = ShardReport(quorum.quorum_id, 0, 2, 0, "fresh", 0, 0.5, 100, (keeper.replica_id,), formed=True)
        full = (Exposure(keeper.replica_id, "no memory"),)
        await member.send(replace(told, exposed=full), Heartbeat())
        await keeper.send(replace(told, seat=1, keepers=(), exposed=(Exposure("", "no other member"),)), Heartbeat())
        for each in (member, keeper, whole):
            await asking.tell(Teller(each.replica_id), step(time.time(), 1))

        async def shown(*exposed: str) -> dict[str, Any]:
            def of(now: dict[str, Any]) -> dict[str, Any]:
                return {group["name"]: group["copies"] for group in now["groups"]}

            def is_shown(now: dict[str, Any]) -> bool:
                return tuple((of(now).get(name) or {}).get("exposed") for name in ("r0", "r1")) == exposed

            return of(await asking.until("now", is_shown))

        assert await shown("its keeper r1 has no copies: no memory", "no other member") == {
            "r0": {"keepers": ["r1"], "exposed": "its keeper r1 has no copies: no memory", "bytes": 100},
            "r1": {"keepers": [], "exposed": "no other member", "bytes": 100},
            "r2": None,
        }
        await member.send(told, Heartbeat())
        assert (await shown("", "no other member"))["r0"] == {"keepers": ["r1"], "exposed": "", "bytes": 100}
        keeper.cut()
        await asking.until("now", lambda now: [group["copies"] is None for group in now["groups"]][1:] == [True, True])


async def test_an_upload_that_failed_says_why_and_a_live_state_that_is_left_as_it_is_did_not_fail() -> None:
    one = state(1)
    async with told_by_a_relay() as (asking, uploading, there):
        await uploading.upload(one, "c1", chunks=[0])
        await uploading.call("POST", f"{uploading.checkpoints}/c1/abort", 204, json={"reason": "disk on fire"})
        await uploading.upload(one, "c2", step=2, chunks=[0, 1])
        there.core.limits = Limits(upload_seconds=0.0)  # no more reports about it
        there.chunks.deadline_changed.set()
        found = await asking.until("transfers", lambda it: [bool(of["ended"]) for of in it["transfers"]] == [True] * 2)
        silent, failed = found["transfers"]
        assert (failed["name"], failed["error"], failed["bytes_done"]) == ("c1", "disk on fire", len(one.chunks[0]))
        assert (silent["name"], silent["error"], silent["step"]) == ("c2", "", 2)
        assert (silent["bytes_done"], silent["bytes_total"]) == (2 * len(one.chunks[0]), len(one.pack))


async def test_a_relay_sends_its_last_records_when_it_stops() -> None:
    one = state(1)
    async with told_by_a_relay() as (asking, uploading, there):
        await uploading.store(one)
        await there.stop()
        assert [of["name"] for of in (await asking.get("transfers"))["transfers"] if of["ended"]] == ["c1"]


async def test_a_sender_outlives_a_restart_of_the_service_and_nothing_is_lost_or_counted_twice(tmp_path: Path) -> None:
    addresses: list[str] = []
    sender = Sender("worker", "a:1", lambda: addresses[-1] if addresses else None, Identity(), job=JOB, interval=0.01)
    running = asyncio.create_task(sender.run())
    try:
        for number in range(1, 4):
            for at in range(5):
                record = StepRecord(t=time.time(), step=5 * number + at - 4, seconds=0.001, committed=True)
                sender.record(record)
            async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
                addresses.append(one.address)
                told = await asking.until("goodput", lambda it, wanted=5 * number: it["steps_committed"] >= wanted)
                assert told["steps_committed"] == 5 * number
        assert sender.dropped == 0
    finally:
        running.cancel()
        await asyncio.wait([running])


def test_settings_come_from_flags_and_environment(tmp_path: Path) -> None:
    environ = {"KEEPSTEP_METRICS_KEEP_EVENTS": "7d", "KEEPSTEP_LIGHTHOUSE": "l1:1,l2:2", "KEEPSTEP_TOKEN": "t" * 16}
    found = read_settings({"data_dir": tmp_path}, environ)
    assert (found.keep_events, found.data_dir, found.bind) == (7 * 86400, tmp_path, "127.0.0.1:29530")
    assert found.lighthouses == ("http://l1:1", "http://l2:2")
    assert isinstance(found.token, ClientToken)
    assert found.shown_token() == "t" * 16
    with pytest.raises(ValueError, match="invalid snapshot_every 0: expected more than 0"):
        read_settings({"snapshot_every": 0.0}, {})


async def test_prometheus_has_the_share_of_the_time_in_each_state() -> None:
    now = time.time()
    async with metrics() as one, client(one.address) as asking:
        await asking.tell(Teller("a:1"), *(step(now - 4 + at, at + 1, quorum_seconds=0.5) for at in range(4)))
        text = (await asking.call("GET", "/metrics")).decode()
    found = re.findall(r'^keepstep_job_time_ratio\{job="job",state="(\w+)"\} (\S+)', text, re.MULTILINE)
    shares = {state: float(share) for state, share in found}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["waiting_slow_group"] == pytest.approx(3 * shares["waiting_quorum"]), "all waits but the first"
    assert 'keepstep_job_groups{job="job",state="waiting_slow_group"}' not in text, "only the end of a wait tells"
