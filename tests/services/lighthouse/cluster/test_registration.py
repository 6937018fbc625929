"""Services that register: leased records in the store, what the cluster shows, what workers learn, what keeps it up."""

from __future__ import annotations

import asyncio
import json
import uuid
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.registry import service_records, service_registry
from keepstep_lighthouse.store.contract import StoreError, Write, WriteFailedError
from keepstep_lighthouse.store.memory_store import MemoryStore
from keepstep_mesh.discovery.registration import Registration, registered
from keepstep_mesh.protocol.messages import Quorum, ServiceAddress, Services, Welcome
from tests.services.lighthouse.cluster.registrations import RELAY, TOLD, known
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import DEADLINE, connection, eventually, lighthouse, worker

PATH = "/v1/services/relay/relay-1"


async def rest(address: str, method: str, path: str, status: int, **how: Any) -> Any:
    async with (
        asyncio.timeout(DEADLINE),
        aiohttp.ClientSession() as http,
        http.request(method, address + path, **how) as answer,
    ):
        text = await answer.text()
        assert answer.status == status, text
        return json.loads(text) if text else None


async def services_of(one: Lighthouse) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await rest(one.address, "GET", "/v1/cluster", 200))["services"]
    return found


# ---- the record


async def test_a_browser_is_sent_on_to_the_metrics_service() -> None:
    async with lighthouse() as one, aiohttp.ClientSession() as http:
        async with http.get(f"{one.address}/", allow_redirects=False) as answer:
            assert answer.status == 404
            assert "keepstep metrics" in (await answer.json(content_type=None))["detail"]
        async with registered([one.address], Registration("metrics", "m", "http://10.0.0.8:29530")) as registrar:
            await known(registrar)
            async with http.get(f"{one.address}/", allow_redirects=False) as answer:
                assert (answer.status, answer.headers["Location"]) == (302, "http://10.0.0.8:29530/")


async def test_a_service_is_shown_until_it_says_goodbye() -> None:
    async with lighthouse() as one:
        async with registered([one.address], RELAY) as registrar:
            await known(registrar)
            assert (registrar.lighthouse, registrar.trouble) == (one.address, None)
            (shown,) = await services_of(one)
            assert shown.pop("since") > 0
            assert shown == {
                "kind": "relay",
                "name": "relay-1",
                "address": "http://10.0.0.7:29520",
                "ttl_seconds": 30.0,
                "details": {"chunks": "memory", "gib": 64},
            }
        assert await services_of(one) == []


async def test_registering_again_is_the_same_and_what_changed_is_shown() -> None:
    async with lighthouse() as one:
        body = {"address": "http://a:1"}
        first = await rest(one.address, "PUT", PATH, 200, json=body)
        assert await rest(one.address, "PUT", PATH, 200, json=body) == first
        second = await rest(one.address, "PUT", PATH, 200, json={**body, "details": {"full": True}})
        assert second == {**first, "details": {"full": True}}
        moved = await rest(one.address, "PUT", PATH, 200, json={"address": "http://b:1"})
        assert (moved["address"], moved["since"] > first["since"]) == ("http://b:1", True)
        assert await services_of(one) == [moved]
        for _ in range(2):
            assert await rest(one.address, "DELETE", PATH, 204) is None
        assert await services_of(one) == []


async def test_a_renewal_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lighthouse() as one:
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1"})

        async def written(*_: object) -> bool:
            raise WriteFailedError("a renewal was written")

        with monkeypatch.context() as planted:
            planted.setattr(MemoryStore, "transact", written)
            await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1"})
            problem = await rest(one.address, "PUT", PATH, 503, json={"address": "http://b:1"})
            assert problem["detail"] == "a renewal was written"
        assert [one["address"] for one in await services_of(one)] == ["http://a:1"]


async def test_a_service_that_says_nothing_is_forgotten_and_one_that_renews_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    renewals = 0
    keep_alive = MemoryStore.keep_alive

    async def counted(store: MemoryStore, lease: int) -> None:
        nonlocal renewals
        await keep_alive(store, lease)
        renewals += 1

    monkeypatch.setattr(MemoryStore, "keep_alive", counted)
    async with lighthouse() as one, worker(one.address) as member:
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1", "ttl_seconds": 1.0})
        assert (await member.next(Services)).services == (ServiceAddress("relay", "relay-1", "http://a:1"),)
        assert (await member.next(Services)).services == ()
        async with registered([one.address], Registration("relay", "relay-1", "http://a:1", ttl=2.0)):
            assert len((await member.next(Services)).services) == 1
            await eventually(lambda: renewals >= 4)  # more than its time to live
            await member.ask(0)
            await member.next(Quorum)  # and nothing before it
        assert (await member.next(Services)).services == ()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/services/oven/x",
            {"address": "http://a:1"},
            "invalid kind of service 'oven': expected one of metrics, relay",
        ),
        ("/v1/services/relay/%20x", {"address": "http://a:1"}, "invalid service name"),
        ("/v1/services/relay/x", {}, "a field is missing; known fields: address, details, ttl_seconds"),
        ("/v1/services/relay/x", {"address": "a"}, "is no address; write http://host:port"),
        ("/v1/services/relay/x", {"address": "a:1"}, "address must be one http://host:port"),
        ("/v1/services/relay/x", {"address": "http://a:1,http://b:1"}, "address must be one http://host:port"),
        ("/v1/services/relay/x", {"address": f"http://{'a' * 300}:1"}, "address must be one http://host:port"),
        ("/v1/services/relay/x", {"address": "http://a:1", "ttl_seconds": 0.5}, "ttl_seconds must be between 1 and"),
        ("/v1/services/relay/x", {"address": "http://a:1", "ttl_seconds": 1e9}, "ttl_seconds must be between"),
        ("/v1/services/relay/x", {"address": "http://a:1", "details": []}, "details must be an object"),
        ("/v1/services/relay/x", {"address": "http://a:1", "details": {"x": [1]}}, "details.x must be text"),
        ("/v1/services/relay/x", {"address": "http://a:1", "details": {"x": float("nan")}}, "details.x must be"),
        ("/v1/services/relay/x", {"address": "http://a:1", "details": {"x": "y" * 5000}}, "(limit 4096)"),
        ("/v1/services/relay/x", {"address": "http://a:1", "role": "x"}, "unknown field 'role'"),
    ],
)
async def test_a_registration_that_will_not_do_is_a_problem_that_says_why(
    path: str, body: dict[str, Any], said: str
) -> None:
    async with lighthouse() as one:
        assert said in (await rest(one.address, "PUT", path, 400, json=body))["detail"]
        assert await services_of(one) == []


async def test_services_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_registry, "MAX_SERVICES", 1)
    async with lighthouse() as one:
        body = {"address": "http://a:1"}
        await rest(one.address, "PUT", PATH, 200, json=body)
        problem = await rest(one.address, "PUT", "/v1/services/relay/relay-2", 503, json=body)
        assert "too many services (limit 1)" in problem["detail"]
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://b:1"})


async def test_a_deposed_lighthouse_writes_no_record() -> None:
    async with lighthouse() as one:
        await one.store.put("epoch", b"7")
        problem = await rest(one.address, "PUT", PATH, 503, json={"address": "http://a:1"})
        assert problem["detail"] == "another term has begun; retry"
        assert await one.store.get_prefix("services/") == {}


@pytest.mark.parametrize("value", [b"", b"[]", b'{"kind": "relay"}', b'{"kind": "oven", "name": "x"}'])
async def test_a_record_that_cannot_be_read_is_left_out(value: bytes) -> None:
    async with lighthouse() as one:
        await one.store.put("services/relay/broken", value)
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1"})
        assert [record["name"] for record in await services_of(one)] == ["relay-1"]
        with pytest.raises(StoreError, match="services/relay/broken"):
            service_records.decode("services/relay/broken", value)


async def test_a_record_of_a_newer_build_is_read() -> None:
    plain = {"kind": "relay", "name": "x", "address": "http://a:1", "ttl_seconds": 9, "since": 1.0, "invented": 1}
    record = service_records.decode("services/relay/x", json.dumps(plain).encode())
    assert (record.address, record.details) == ("http://a:1", {})


async def test_a_record_that_another_lighthouse_writes_to_the_store_is_seen() -> None:
    async with lighthouse() as one, worker(one.address) as member:
        record = service_registry.new_record("metrics", "m", "http://m:1", 15.0, {})
        await one.store.put(record.key, service_records.encode(record))
        assert (await member.next(Services)).services == (record.as_address,)
        assert (await services_of(one))[0]["name"] == "m"
        await one.store.transact((), (Write(record.key, None),))
        assert (await member.next(Services)).services == ()


async def test_services_are_followed_again_after_the_store_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_registry, "FOLLOW_AGAIN_SECONDS", 0.01)
    async with lighthouse() as one:
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1"})
        await rest(one.address, "PUT", "/v1/services/relay/b", 200, json={"address": "http://b:1"})
        memory = one.store
        assert isinstance(memory, MemoryStore)
        watches = memory._watches
        memory._watches = set()
        for watch in watches:
            watch.end(StoreError("planted"))
        await memory.transact((), (Write("services/relay/b", None),))
        await eventually(lambda: [record.name for record in one.registry.records] == ["relay-1"])
        await memory.transact((), (Write("services/relay/relay-1", None),))
        await eventually(lambda: one.registry.records == ())


# ---- what workers learn


async def test_workers_learn_of_services_with_the_welcome_and_when_they_change() -> None:
    async with lighthouse() as one, worker(one.address, "r0:1") as early:
        assert early.welcome.services == ()
        async with registered([one.address], RELAY):
            assert await early.next(Services) == Services((TOLD,))
            async with worker(one.address, "r1:1", "another-job") as late:
                assert late.welcome.services == (TOLD,)
        assert await early.next(Services) == Services(())


async def test_nothing_is_told_before_the_welcome() -> None:
    async with (
        lighthouse() as one,
        connection(one.address) as silent,
        registered([one.address], RELAY) as registrar,
    ):
        await known(registrar)
        await silent.hello()
        assert (await silent.next(Welcome)).services == (TOLD,)


# ---- the store


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path, etcd: EtcdCluster) -> str:
    """Address of an empty store."""
    kinds = {"memory": "memory://", "sqlite": f"sqlite://{tmp_path}/x.db", "etcd": f"{etcd.address}/{uuid.uuid4()}"}
    return kinds[request.param]


async def test_a_record_ends_with_its_lease_whichever_store_keeps_it(store: str) -> None:
    async with lighthouse(store=store) as one, worker(one.address) as member:
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1", "ttl_seconds": 2})
        assert len((await member.next(Services)).services) == 1
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1", "ttl_seconds": 2})
        assert (await member.next(Services)).services == ()
        assert (await rest(one.address, "GET", "/v1/cluster", 200))["store"]["trouble"] is None


@pytest.mark.parametrize("store", ["sqlite", "etcd"], indirect=True)
async def test_a_record_outlives_the_lighthouse(store: str) -> None:
    url = store
    async with lighthouse(store=url) as one:
        await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1", "ttl_seconds": 20})
    async with lighthouse(store=url) as one:
        await eventually(lambda: len(one.registry.records) == 1)
        (record,) = await services_of(one)
        assert (await rest(one.address, "PUT", PATH, 200, json={"address": "http://a:1", "ttl_seconds": 20})) == record


async def test_the_cluster_tells_whether_the_store_works(monkeypatch: pytest.MonkeyPatch) -> None:
    async with lighthouse() as one:
        store = (await rest(one.address, "GET", "/v1/cluster", 200))["store"]
        assert store.pop("read_seconds") >= 0
        assert store == {"kind": "memory", "trouble": None}

        async def away(*_: object) -> bytes:
            raise StoreError("etcd is away")

        with monkeypatch.context() as planted:
            planted.setattr(MemoryStore, "get", away)
            store = (await rest(one.address, "GET", "/v1/cluster", 200))["store"]
            assert store == {"kind": "memory", "trouble": "etcd is away", "read_seconds": None}
