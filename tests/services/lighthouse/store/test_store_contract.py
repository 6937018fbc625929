"""The contract of every store, then the additional one of a store on a disk."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from keepstep_lighthouse.store.contract import (
    Change,
    Compare,
    Store,
    StoreError,
    Watch,
    Write,
    WriteFailedError,
)
from keepstep_lighthouse.store.opening import open_store
from keepstep_lighthouse.store.sqlite_store import SqliteStore
from tests.support.services.etcd_server import EtcdCluster

DEADLINE = 60.0
SHORT, LONG = 1.5, 60.0
"""Seconds of a lease; a busy machine takes a while between two calls."""


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def url(request: pytest.FixtureRequest, tmp_path: Path, etcd: EtcdCluster) -> str:
    return {
        "memory": "memory://",
        "sqlite": f"sqlite://{tmp_path}/state/lighthouse.db",
        "etcd": f"{etcd.address}/{uuid.uuid4()}",
    }[request.param]


@pytest.fixture
async def store(url: str) -> AsyncIterator[Store]:
    opened = await open_store(url)
    yield opened
    await opened.close()


async def until(watch: Watch, key: str, value: bytes | None) -> list[Change]:
    """The changes that ``watch`` tells up to this one."""
    seen = []
    async with asyncio.timeout(DEADLINE):
        async for change in watch:
            seen.append(change)
            if change == Change(key, value):
                return seen
    raise AssertionError(f"the watch ended before {key} was {value!r}: {seen}")


async def test_a_value_that_was_put_is_read(store: Store):
    assert await store.get("a") is None
    await store.put("a", b"1")
    await store.put("a", b"")
    assert await store.get("a") == b""


async def test_a_prefix_is_answered_in_order_and_nothing_else(store: Store):
    for key in ("jobs/b", "jobs", "jobs/a", "jobz/c", "jobs/a/x"):
        await store.put(key, key.encode())
    assert list((await store.get_prefix("jobs/")).items()) == [
        ("jobs/a", b"jobs/a"),
        ("jobs/a/x", b"jobs/a/x"),
        ("jobs/b", b"jobs/b"),
    ]


async def test_a_transaction_whose_comparisons_hold_writes_all(store: Store):
    await store.put("epoch", b"1")
    done = await store.transact(
        (Compare("epoch", b"1"), Compare("new", None)),
        (Write("epoch", b"2"), Write("new", b"x"), Write("absent", None)),
    )
    assert done
    assert await store.get_prefix("") == {"epoch": b"2", "new": b"x"}


@pytest.mark.parametrize("failing", [Compare("epoch", b"2"), Compare("epoch", None), Compare("other", b"")])
async def test_a_transaction_of_which_one_comparison_fails_writes_nothing(store: Store, failing: Compare):
    await store.put("epoch", b"1")
    assert not await store.transact((Compare("epoch", b"1"), failing), (Write("epoch", b"9"), Write("new", b"x")))
    assert await store.get_prefix("") == {"epoch": b"1"}


async def test_of_two_that_compare_and_swap_at_once_one_succeeds(store: Store):
    await store.put("epoch", b"1")
    tries = [store.transact((Compare("epoch", b"1"),), (Write("epoch", b"%d" % n),)) for n in range(10, 20)]
    assert sorted(await asyncio.gather(*tries)) == [False] * 9 + [True]


async def test_a_deleted_key_is_absent(store: Store):
    await store.put("a", b"1")
    await store.transact((), (Write("a", None),))
    assert await store.get("a") is None
    assert await store.transact((Compare("a", None),), (Write("a", b"2"),))


async def test_keys_of_a_lease_that_runs_out_are_gone(store: Store):
    lease = await store.grant_lease(SHORT)
    await store.put("stays", b"1")
    async with store.watch("") as watch:
        await store.put("leased", b"1", lease)
        await until(watch, "leased", None)
    assert await store.get_prefix("") == {"stays": b"1"}
    with pytest.raises(WriteFailedError):
        await store.put("late", b"1", lease)
    with pytest.raises(WriteFailedError):
        await store.keep_alive(lease)


async def test_a_lease_that_is_kept_alive_keeps_its_keys(store: Store):
    kept, other = await store.grant_lease(SHORT), await store.grant_lease(SHORT)
    await store.put("kept", b"1", kept)
    await store.put("other", b"1", other)
    async with store.watch("other") as watch:
        ended = asyncio.create_task(until(watch, "other", None))
        for _ in range(10):
            await asyncio.wait((ended,), timeout=SHORT / 10)
            await store.keep_alive(kept)
        await ended
    assert await store.get("kept") == b"1"


async def test_revoking_a_lease_deletes_its_keys_at_once(store: Store):
    lease, other = await store.grant_lease(LONG), await store.grant_lease(LONG)
    await store.put("a", b"1", lease)
    await store.put("b", b"1", other)
    await store.revoke(lease)
    await store.revoke(lease)
    assert await store.get_prefix("") == {"b": b"1"}


async def test_a_key_written_again_belongs_to_the_lease_of_the_last_write(store: Store):
    first, second = await store.grant_lease(LONG), await store.grant_lease(LONG)
    await store.put("moved", b"1", first)
    await store.put("moved", b"2", second)
    await store.put("freed", b"1", first)
    await store.put("freed", b"2")
    await store.revoke(first)
    assert await store.get_prefix("") == {"freed": b"2", "moved": b"2"}


async def test_a_watch_tells_what_is_there_then_what_changes(store: Store):
    await store.put("jobs/a", b"1")
    await store.put("other", b"1")
    async with store.watch("jobs/") as watch:
        await store.put("jobs/b", b"2")
        await store.put("other", b"2")
        await store.transact((), (Write("jobs/a", None),))
        seen = await until(watch, "jobs/a", None)
        assert {change.key: change.value for change in seen} == {"jobs/b": b"2", "jobs/a": None}


async def test_a_slow_watcher_gets_the_last_state_of_each_key_and_no_backlog(store: Store):
    async with store.watch("") as watch:
        for number in range(200):
            await store.put("busy", b"%d" % number)
        await store.put("end", b"")
        async with asyncio.timeout(DEADLINE):
            while "end" not in watch._pending:  # noqa: ASYNC110 - told, and not read yet
                await asyncio.sleep(0.01)
        assert await until(watch, "end", b"") == [Change("busy", b"199"), Change("end", b"")]


async def test_a_watch_that_waits_ends_when_the_store_is_closed(store: Store):
    async def all_changes() -> list[Change]:
        return [change async for change in store.watch("")]

    waiting = asyncio.create_task(all_changes())
    await asyncio.sleep(0)
    await store.close()
    async with asyncio.timeout(DEADLINE):
        assert await waiting == []


async def test_a_closed_store_says_so(store: Store):
    await store.close()
    await store.close()
    for call in (store.get("a"), store.get_prefix(""), store.put("a", b""), store.grant_lease(1.0)):
        with pytest.raises(StoreError, match="closed"):
            await call


# ---- addresses


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("etcd://", "expected etcd://host:port"),
        ("etcd://a:x/jobs", "invalid endpoint 'a:x'"),
        ("etcd://user:secret@a:2379/jobs", "KEEPSTEP_ETCD_PASSWORD"),
        ("etcd://a:2379/jobs?user=me", "an etcd user needs KEEPSTEP_ETCD_PASSWORD"),
        ("etcd://a:2379/jobs?cert=c&key=k", "incomplete TLS files"),
        ("etcd://a:2379/jobs?ttl=3", "unknown ttl"),
        ("memory", "expected memory://"),
        ("memory://x", ": expected memory:"),
        ("sqlite:x.db", ": expected memory:"),
        ("sqlite://", ": expected memory:"),
        ("", ": expected memory:"),
    ],
)
async def test_an_address_that_is_no_store_is_refused_with_advice(address: str, said: str):
    with pytest.raises(StoreError, match=said):
        await open_store(address)


# ---- on a disk


async def test_written_values_are_there_when_the_file_is_opened_again(tmp_path: Path):
    url = f"sqlite://{tmp_path}/x.db"
    store = await open_store(url)
    await store.put("a", b"1")
    lease = await store.grant_lease(SHORT)
    await store.put("leased", b"1", lease)
    await store.close()

    again = await open_store(url)
    assert await again.get_prefix("") == {"a": b"1", "leased": b"1"}
    assert await again.grant_lease(LONG) != lease
    async with again.watch("leased") as watch:
        await until(watch, "leased", None)
    await again.put("b", b"2")
    await again.close()

    third = await open_store(url)
    assert await third.get_prefix("") == {"a": b"1", "b": b"2"}
    await third.close()


async def test_a_write_whose_asker_is_cancelled_leaves_memory_and_file_equal(tmp_path: Path):
    url = f"sqlite://{tmp_path}/x.db"
    store = await open_store(url)
    assert isinstance(store, SqliteStore)
    loop, committing, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def hold(statement: str) -> None:
        if statement == "COMMIT" and not go_on.is_set():
            loop.call_soon_threadsafe(committing.set)
            go_on.wait(DEADLINE)

    await loop.run_in_executor(store._thread, store._connection.set_trace_callback, hold)
    write = asyncio.create_task(store.put("n", b"1"))
    async with asyncio.timeout(DEADLINE):
        await committing.wait()
    write.cancel()
    await asyncio.wait((write,))
    go_on.set()
    await store.put("last", b"")
    seen = await store.get_prefix("")
    await store.close()
    again = await open_store(url)
    assert await again.get_prefix("") == seen == {"n": b"1", "last": b""}
    await again.close()


async def test_a_second_lighthouse_on_the_same_file_is_told_so(tmp_path: Path):
    url = f"sqlite://{tmp_path}/x.db"
    store = await open_store(url)
    with pytest.raises(StoreError, match="another lighthouse is using it"):
        await open_store(url)
    await store.put("a", b"1")
    await store.close()


@pytest.mark.parametrize("content", [b"this is a text, not a store. " * 100, b"SQLite format 3\0" + b"\xff" * 4096])
async def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path, content: bytes):
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"cannot open the store .*notes\.txt"):
        await open_store(f"sqlite://{path}")
    assert path.read_bytes() == content


async def test_a_path_that_cannot_be_is_refused(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot open the store"):
        await open_store(f"sqlite://{tmp_path}/file/x.db")


async def test_a_mistake_in_the_path_creates_no_folders(tmp_path: Path):
    with pytest.raises(StoreError, match=r"folder .*tpyo not found; correct the path"):
        await open_store(f"sqlite://{tmp_path}/tpyo/state/x.db")
    assert not (tmp_path / "tpyo").exists()


WRITER = """
import asyncio, sys
from keepstep_lighthouse.store.opening import open_store
async def main():
    store = await open_store(sys.argv[1])
    print("open", flush=True)
    number = int(await store.get("n") or b"0")
    while True:
        number += 1
        await store.put("n", b"%d" % number)
        print(number, flush=True)
asyncio.run(main())
"""


async def test_acknowledged_writes_survive_sigkill(tmp_path: Path):
    url = f"sqlite://{tmp_path}/x.db"
    for _ in range(5):
        writer = await asyncio.create_subprocess_exec(sys.executable, "-c", WRITER, url, stdout=asyncio.subprocess.PIPE)
        async with asyncio.timeout(DEADLINE):
            for _ in range(20):
                line = await writer.stdout.readline()
            os.kill(writer.pid, signal.SIGKILL)
            acknowledged = int(((await writer.stdout.read()).split(b"\n")[-2:-1] or [line])[0])
            await writer.wait()
        store = await open_store(url)
        assert int(await store.get("n")) >= acknowledged
        await store.close()


FILLER = """
import asyncio, resource, sys
from keepstep_lighthouse.store.contract import StoreError, WriteFailedError
from keepstep_lighthouse.store.opening import open_store
async def main():
    store = await open_store(sys.argv[1])
    await store.put("small", b"1")
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    try:
        await store.put("large", bytes(1_000_000))
        sys.exit("a write beyond the limit succeeded")
    except StoreError as error:
        print(type(error).__name__, error)
    assert await store.get_prefix("") == {"small": b"1"}, "half a write shows"
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await store.put("large", bytes(1_000_000))
    await store.close()
asyncio.run(main())
"""


def test_a_disk_that_takes_no_more_is_a_clear_error_and_the_store_goes_on_when_it_does(tmp_path: Path):
    """The limit on file sizes is what the kernel offers everywhere to make a real write fail."""
    command = [sys.executable, "-c", FILLER, f"sqlite://{tmp_path}/x.db"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" in done.stdout
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
async def test_a_full_disk_is_named(small_disk: Path):
    store = await open_store(f"sqlite://{small_disk}/x.db")
    with pytest.raises(StoreError, match="the disk is full"):
        await store.put("large", bytes(4_000_000))
    assert await store.get("large") is None
    await store.put("small", b"1")
    assert await store.get("small") == b"1"
    await store.close()
