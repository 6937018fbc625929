"""The store that members meet over: in this process and over HTTP, with limits, deadlines and aborts."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import math
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import aiohttp
import msgpack
import pytest
from aiohttp import web

from keepstep.rendezvous import key_value_server
from keepstep.rendezvous.store_client import (
    KeyValueServer,
    RendezvousAbortedError,
    RendezvousError,
    RendezvousStore,
    Table,
)
from keepstep_mesh.errors import AuthError
from keepstep_mesh.security.tokens import ClientToken
from tests.unit.keepstep.rendezvous.rendezvous_driver import LONG, NEW, begun, call, served


@pytest.fixture
async def server() -> AsyncIterator[KeyValueServer]:
    server = KeyValueServer()
    yield server
    server.close()


@pytest.fixture(params=["here", "over HTTP"])
async def make(request: pytest.FixtureRequest, server: KeyValueServer) -> AsyncIterator[Callable[..., RendezvousStore]]:
    """Makes stores on one server."""
    stores = []
    async with served(server) as address:

        def make(table: Table = NEW, timeout: timedelta = timedelta(seconds=30)) -> RendezvousStore:
            here = server if request.param == "here" else None
            stores.append(RendezvousStore(address, table, timeout=timeout, server=here))
            return stores[-1]

        yield make
        for store in stores:
            store.close()


async def test_one_store_gets_the_values_that_another_sets(make) -> None:
    one, other = make(), make()
    await call(one.set, "key", b"\x00value\xff")
    assert await call(other.get, "key") == b"\x00value\xff"
    await call(one.set, "text", "words")
    assert await call(other.multi_get, ["key", "text"]) == [b"\x00value\xff", b"words"]
    await call(other.multi_set, ["a", "b"], [b"1", b"2"])
    assert await call(one.multi_get, ["a", "b"]) == [b"1", b"2"]
    assert await call(one.num_keys) == 4


async def test_a_get_waits_for_the_key(make) -> None:
    one, other = make(), make()
    waiting = await begun(call(one.get, "key"))
    await call(other.set, "another", b"")
    await call(other.set, "key", b"value")
    assert await waiting == b"value"


async def test_a_wait_is_for_all_keys(make) -> None:
    one, other = make(), make()
    waiting = await begun(call(one.wait, ["a", "b", "c"]))
    for key in ("c", "a"):
        await call(other.set, key, b"x")
    await asyncio.sleep(0.1)  # as in ``begun``
    assert not waiting.done()
    await call(other.set, "b", b"x")
    await waiting


async def test_one_answer_brings_the_other_values_along(make, server) -> None:
    one, other = make(), make()
    await call(other.multi_set, ["a", "b", "c"], [b"1", b"2", b"3"])
    await call(one.wait, ["c"])
    server.close()
    assert await call(one.multi_get, ["a", "b", "c"]) == [b"1", b"2", b"3"]


async def test_a_key_that_was_deleted_and_set_again_is_found(make) -> None:
    one, other = make(), make()
    await call(other.set, "first", b"1")
    await call(one.get, "first")
    assert await call(other.delete_key, "first")
    assert not await call(other.delete_key, "first")
    await call(other.set, "second", b"2")
    await call(other.set, "third", b"3")
    assert await call(one.get, "third") == b"3"
    assert await call(one.get, "second") == b"2"


async def test_counters_appends_and_conditional_sets(make) -> None:
    one, other = make(), make()
    assert await call(one.add, "count", 2) == 2
    assert await call(other.add, "count", 3) == 5
    assert await call(other.get, "count") == b"5"
    await call(one.append, "log", b"ab")
    await call(other.append, "log", b"cd")
    assert await call(one.get, "log") == b"abcd"
    assert await call(one.compare_set, "cas", b"", b"first") == b"first"
    assert await call(one.compare_set, "cas", b"other", b"second") == b"first"
    assert await call(one.compare_set, "cas", b"first", b"second") == b"second"
    assert await call(one.compare_set, "absent", b"expected", b"x") == b"expected"
    assert not await call(one.check, ["absent"])
    assert await call(one.check, ["cas", "log"])


async def test_a_hundred_threads_count_right(make) -> None:
    store = make()
    await asyncio.gather(*(call(store.add, "count", 1) for _ in range(100)))
    assert await call(store.add, "count", 0) == 100


async def test_a_wait_ends_with_its_timeout(make) -> None:
    store = make(timeout=timedelta(seconds=0.1))
    with pytest.raises(TimeoutError, match="never, b not set in the rendezvous"):
        await call(store.wait, ["never", "b"])
    with pytest.raises(TimeoutError):
        await call(make().wait, ["never"], timedelta(seconds=0.1))


async def test_a_wait_outlasts_the_servers_patience(make, monkeypatch) -> None:
    monkeypatch.setattr(key_value_server, "WAIT_POLL_SECONDS", 0.05)
    one, other = make(), make()
    waiting = await begun(call(one.get, "key"))
    await call(other.set, "key", b"value")
    assert await waiting == b"value"


async def test_abort_ends_waits_and_later_calls(make) -> None:
    store, other = make(timeout=LONG), make()
    waits = [await begun(call(store.get, key)) for key in "ab"]
    store.abort("r2 was lost")
    store.abort("and again")
    for wait in waits:
        with pytest.raises(RendezvousAbortedError, match="r2 was lost"):
            await wait
    with pytest.raises(RendezvousAbortedError):
        await call(store.set, "key", b"")
    await call(other.set, "key", b"others go on")


async def test_tables_are_apart(make) -> None:
    await call(make(Table("job", 1, 7, 0)).set, "key", b"rank 0")
    await call(make(Table("job", 1, 7, 1)).set, "key", b"rank 1")
    await call(make(Table("other", 1, 7, 0)).set, "key", b"other job")
    assert await call(make(Table("job", 1, 7, 1)).get, "key") == b"rank 1"
    assert await call(make(Table("other", 1, 7, 0)).get, "key") == b"other job"


@pytest.mark.parametrize("newer", [Table("job", 1, 8, 0), Table("job", 2, 7, 0), Table("job", 1, 8, 3)])
async def test_a_newer_quorum_ends_the_waits_of_the_older_and_drops_it(make, newer) -> None:
    old = make(NEW, LONG)
    await call(old.set, "key", b"")
    waiting = await begun(call(old.get, "never"))
    await call(make(newer).set, "key", b"new")
    with pytest.raises(RendezvousError, match="quorum 7 of job 'job' is over"):
        await waiting
    with pytest.raises(RendezvousError, match="is over"):
        await call(make(NEW).check, ["key"])
    await call(make(Table("other", 1, 1, 0)).set, "key", b"older, but of another job")


async def test_a_closed_server_ends_every_wait(make, server) -> None:
    waiting = await begun(call(make(timeout=LONG).get, "never"))
    server.close()
    with pytest.raises(RendezvousError, match="shutting down"):
        await waiting
    with pytest.raises(RendezvousError, match="shutting down"):
        await call(make().set, "key", b"")


async def test_a_value_has_a_limit(make) -> None:
    store = make()
    await call(store.set, "most", bytes(key_value_server.MAX_VALUE_BYTES))
    with pytest.raises(RendezvousError, match="bytes"):
        await call(store.set, "more", bytes(key_value_server.MAX_VALUE_BYTES + 1))
    with pytest.raises(RendezvousError, match="bytes"):
        await call(store.append, "most", b"x")


async def test_the_server_is_bounded_and_forgets_what_nobody_uses(server, monkeypatch) -> None:
    monkeypatch.setattr(key_value_server, "MAX_TOTAL_BYTES", 10_000)
    monkeypatch.setattr(key_value_server, "MAX_TABLES", 3)
    for rank in range(3):
        server.set(Table(group_rank=rank), "key", bytes(2000))
    with pytest.raises(RendezvousError, match="full: it stores up to 3 tables"):
        server.set(Table(group_rank=3), "key", b"")
    server.delete(Table(), "key")
    for _ in range(3):  # the same key over and over takes no more room
        server.set(Table(), "key", bytes(2000))
    with pytest.raises(RendezvousError, match="full: it stores up to 10000 bytes"):
        server.set(Table(), "large", bytes(5000))
    monkeypatch.setattr(key_value_server, "IDLE_TABLE_SECONDS", -1.0)
    server.set(Table(group_rank=3), "large", bytes(5000))


async def test_given_up_waits_are_forgotten(server) -> None:
    for _ in range(100):
        server.wait(NEW, ["never"]).cancel()
    assert sum(len(queue) for queue in server._tables[NEW].waiting.values()) == 1


async def test_a_token_is_asked_for() -> None:
    async with served(KeyValueServer(token="secret")) as address:
        right = RendezvousStore(address, NEW, token="secret")
        await call(right.set, "key", b"value")
        right.close()
        for token in (None, "wrong", "sécret"):
            wrong = RendezvousStore(address, NEW, token=token)
            with pytest.raises((AuthError, UnicodeError)):
                await call(wrong.get, "key")
            wrong.close()


async def test_during_a_rotation_members_with_either_token_meet(tmp_path) -> None:
    file = tmp_path / "token"
    file.write_text("new\nold\n")
    async with served(KeyValueServer(token=ClientToken({"KEEPSTEP_TOKEN_FILE": str(file)}))) as address:
        old, new = (RendezvousStore(address, NEW, token=token) for token in ("old", "new"))
        await call(old.set, "key", b"value")
        assert await call(new.get, "key") == b"value"
        old.close()
        new.close()


@pytest.mark.parametrize("address", ["", "host", "http://host", "host:port"])
def test_a_bad_address_is_a_value_error(address) -> None:
    with pytest.raises(ValueError):
        RendezvousStore(address)


BAD = [
    b"",
    b"garbage",
    b"\xc1",
    msgpack.packb({}),
    msgpack.packb(["job", 1, 7, 0]),
    msgpack.packb(["job", "1", 7, 0, "get", "key"]),
    msgpack.packb(["job", 1, 7, 0, "no such operation", "key"]),
    msgpack.packb(["job", 1, 7, 0, "close"]),
    msgpack.packb(["job", 1, 7, 0, "set", "key"]),
    msgpack.packb(["job", 1, 7, 0, "set", "key", "text"]),
    msgpack.packb(["job", 1, 7, 0, "set", 1, b"value"]),
    msgpack.packb(["job", 1, 7, 0, "add", "text", 1]),
    msgpack.packb(["job", 1, 7, 0, "wait", [[]], 0, 1.0]),
    msgpack.packb(["job", 1, 7, 0, "wait", ["key"], -1, 0.0]),
    msgpack.packb(["job", 1, 7, 0, "wait", ["key"], 0, math.nan]),
    msgpack.packb(["job", 1, 7, 0, "items", -1]),
    bytes(key_value_server.MAX_BODY_BYTES + 1),
]


@pytest.mark.parametrize("body", BAD, ids=range(len(BAD)))
async def test_a_bad_request_is_refused_with_a_reason_and_hurts_nobody(server, body) -> None:
    server.set(NEW, "text", b"not a number")
    async with served(server) as address, aiohttp.ClientSession() as session:
        async with session.post(f"{address}{key_value_server.PATH}", data=io.BytesIO(body)) as response:
            assert response.status == 400
            assert response.content_type == "application/problem+json"
            assert (await response.json())["detail"]
        store = RendezvousStore(address, NEW)
        assert await call(store.get, "text") == b"not a number"
        store.close()


async def test_a_request_that_never_comes_whole_is_given_up(server, monkeypatch) -> None:
    monkeypatch.setattr(key_value_server, "BODY_SECONDS", 0.2)

    async def never() -> AsyncIterator[bytes]:
        yield b"\x96"
        await asyncio.Event().wait()

    async with (
        served(server) as address,
        aiohttp.ClientSession() as session,
        asyncio.timeout(60),
        session.post(f"{address}{key_value_server.PATH}", data=never()) as response,
    ):
        assert response.status == 400
        assert "not received within 0.2 s" in (await response.json())["detail"]


async def test_a_rendezvous_of_many_ranks_takes_few_requests(server) -> None:
    """Each of 32 ranks sets one key and reads all others, in order, as Gloo does."""
    requests = []
    handle = server._handle

    async def counted(request: web.Request) -> web.Response:
        requests.append(request.path)
        return await handle(request)

    server._handle = counted
    size = 32
    async with served(server) as address:

        def meet(rank: int) -> None:
            store = RendezvousStore(address, NEW)
            store.set(f"0/{rank}", bytes(300))
            for other in range(size):
                store.wait([f"0/{other}"])
                assert len(store.get(f"0/{other}")) == 300
            store.close()

        with concurrent.futures.ThreadPoolExecutor(size) as pool:
            loop = asyncio.get_running_loop()
            await asyncio.gather(*(loop.run_in_executor(pool, meet, rank) for rank in range(size)))
    assert len(requests) < size * size / 2
