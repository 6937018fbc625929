"""Faults that a store in etcd must survive: nodes that die, freeze, lose their leader or history, or refuse."""

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trustme

from keepstep_lighthouse.store.contract import (
    Compare,
    OutcomeUnknownError,
    Store,
    StoreError,
    Watch,
    Write,
    WriteFailedError,
)
from keepstep_lighthouse.store.etcd_store import CALL_SECONDS
from keepstep_lighthouse.store.opening import open_store
from keepstep_mesh.testing import DEADLINE, ChaosProxy
from tests.support.services.etcd_server import BINARY, EtcdCluster, EtcdNode

ETCDCTL = BINARY.parent / "etcdctl"


@pytest.fixture
def own_etcd(etcd: EtcdCluster, tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[Store]:
    store = await open_store(url)
    try:
        yield store
    finally:
        await store.close()


async def follow(watch: Watch, state: dict[str, bytes], changed: asyncio.Event) -> None:
    """Keeps in ``state`` what the watch tells."""
    async for change in watch:
        if change.value is None:
            state.pop(change.key, None)
        else:
            state[change.key] = change.value
        changed.set()


async def until_equal(state: dict[str, bytes], wanted: dict[str, bytes], changed: asyncio.Event) -> None:
    async with asyncio.timeout(DEADLINE):
        while state != wanted:
            changed.clear()
            await changed.wait()


class Counter:
    """Counts in the store by compare-and-swap, and by the contract: after an unknown outcome it reads first."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.acknowledged = 0
        self.advanced, self.failed = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        value = int(await self._store.get("n") or b"0")
        while True:
            before = b"%d" % value if value else None
            try:
                if not await self._store.transact((Compare("n", before),), (Write("n", b"%d" % (value + 1)),)):
                    raise AssertionError(f"another client changed the counter at {value}")
                value += 1
            except OutcomeUnknownError:
                self.failed.set()
                value = await self._read()
            except WriteFailedError:
                self.failed.set()
                await asyncio.sleep(0.01)  # etcd does not tell when it is back
            self.acknowledged = value
            self.advanced.set()

    async def _read(self) -> int:
        while True:
            try:
                return int(await self._store.get("n") or b"0")
            except StoreError:
                await asyncio.sleep(0.01)  # etcd does not tell when it is back

    async def until_it_advances(self, by: int = 20) -> None:
        goal = self.acknowledged + by
        async with asyncio.timeout(DEADLINE):
            while self.acknowledged < goal:
                self.advanced.clear()
                await self.advanced.wait()


@asynccontextmanager
async def counting(store: Store, state: dict[str, bytes], changed: asyncio.Event) -> AsyncIterator[Counter]:
    """A counter and a watch of it; fails when either of them did."""
    counter = Counter(store)
    async with store.watch("") as watch:
        tasks = [asyncio.create_task(counter.run()), asyncio.create_task(follow(watch, state, changed))]
        try:
            yield counter
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        for one in ended:
            if not isinstance(one, asyncio.CancelledError):
                raise one or AssertionError("ended early")


async def test_an_etcd_that_is_killed_under_load_loses_nothing_that_was_acknowledged(own_etcd: EtcdCluster):
    (node,) = own_etcd.nodes
    state, changed = {}, asyncio.Event()
    async with opened(f"{own_etcd.address}/t") as store:
        async with counting(store, state, changed) as counter:
            for _ in range(3):
                await counter.until_it_advances()
                node.kill()
                counter.failed.clear()
                async with asyncio.timeout(DEADLINE):
                    await counter.failed.wait()
                node.start()
                await counter.until_it_advances()
            acknowledged = counter.acknowledged
            assert int(await store.get("n")) >= acknowledged >= 120
        async with store.watch("") as watch:  # a cancelled write may come after all
            follower = asyncio.create_task(follow(watch, state, changed))
            await store.put("end", b"1")
            await until_equal(state, await store.get_prefix(""), changed)
            follower.cancel()
            await asyncio.wait((follower,))


async def test_three_nodes_go_on_when_their_leader_dies(etcd: EtcdCluster, tmp_path: Path):
    with EtcdCluster(tmp_path / "etcd", size=3) as cluster:
        state, changed = {}, asyncio.Event()
        async with opened(f"{cluster.address}/t") as store, counting(store, state, changed) as counter:
            await counter.until_it_advances()
            for _ in range(2):
                leader = await asyncio.to_thread(leader_of, cluster)
                leader.kill()
                await counter.until_it_advances()
                leader.start()
                await asyncio.to_thread(leader.wait)
                await counter.until_it_advances()
            async with asyncio.timeout(DEADLINE):
                while int(state.get("n", b"0")) < counter.acknowledged:
                    changed.clear()
                    await changed.wait()
            assert counter.acknowledged >= 100


def leader_of(cluster: EtcdCluster) -> EtcdNode:
    for node in cluster.nodes:
        command = [ETCDCTL, "--endpoints", f"127.0.0.1:{node.port}", "endpoint", "status", "--write-out", "fields"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False).stdout
        fields = dict(line.split(" : ") for line in told.splitlines() if " : " in line)
        if fields and fields['"MemberID"'] == fields['"Leader"']:
            return node
    raise AssertionError("no node leads")


async def test_a_node_that_says_nothing_is_given_up_for_the_next(own_etcd: EtcdCluster):
    async with ChaosProxy("127.0.0.1", own_etcd.nodes[0].port) as silent:
        silent.freeze()
        rest = own_etcd.address.removeprefix("etcd://")
        async with opened(f"etcd://127.0.0.1:{silent.port},{rest}/t") as store:
            async with asyncio.timeout(DEADLINE):
                assert await store.get("a") is None
                await store.put("a", b"1")
            assert await store.get("a") == b"1"
            silent.thaw()


async def test_a_write_that_got_no_answer_is_unknown_and_one_that_never_left_failed(own_etcd: EtcdCluster):
    (node,) = own_etcd.nodes
    async with opened(f"{own_etcd.address}/t") as store, asyncio.timeout(DEADLINE):
        while await store.get("a") != b"1":  # an etcd that has just begun may be slow
            with contextlib.suppress(OutcomeUnknownError):
                await store.put("a", b"1")
        node.freeze()
        try:
            async with asyncio.timeout(10 * CALL_SECONDS):
                with pytest.raises(OutcomeUnknownError):
                    await store.put("a", b"2")
                with pytest.raises(StoreError, match="cannot read"):
                    await store.get("a")
        finally:
            node.thaw()
        assert await store.get("a") in (b"1", b"2")
        node.kill()
        async with asyncio.timeout(10 * CALL_SECONDS):
            while True:  # the connection that broke may still be the one in use
                try:
                    await store.put("a", b"3")
                except OutcomeUnknownError:
                    continue
                except WriteFailedError:
                    break


async def test_a_watch_that_lost_its_connection_and_its_history_tells_what_differs(own_etcd: EtcdCluster):
    (node,) = own_etcd.nodes
    state, changed = {}, asyncio.Event()
    async with (
        ChaosProxy("127.0.0.1", node.port) as proxy,
        opened(f"{own_etcd.address}/t") as direct,
        opened(f"etcd://127.0.0.1:{proxy.port}/t") as store,
        store.watch("") as watch,
    ):
        follower = asyncio.create_task(follow(watch, state, changed))
        await direct.put("stays", b"1")
        await direct.put("goes", b"1")
        await until_equal(state, {"stays": b"1", "goes": b"1"}, changed)
        proxy.refuse()
        await direct.transact((), (Write("goes", None), Write("stays", b"2"), Write("comes", b"1")))
        await asyncio.to_thread(compact, node)
        proxy.accept()
        await until_equal(state, {"stays": b"2", "comes": b"1"}, changed)
        await direct.put("comes", b"2")
        await until_equal(state, {"stays": b"2", "comes": b"2"}, changed)
        assert state == await direct.get_prefix("")
        follower.cancel()
        await asyncio.wait((follower,))


def compact(node: EtcdNode) -> None:
    endpoint = [ETCDCTL, "--endpoints", f"127.0.0.1:{node.port}"]
    told = subprocess.check_output([*endpoint, "endpoint", "status", "--write-out", "fields"], text=True)
    revision = next(line.split(" : ")[1] for line in told.splitlines() if '"Revision"' in line)
    subprocess.check_output([*endpoint, "compact", revision], text=True)


async def test_closing_does_not_wait_for_an_etcd_that_is_frozen(own_etcd: EtcdCluster):
    store = await open_store(f"{own_etcd.address}/t")
    async with store.watch("") as _:
        await store.put("a", b"1")
        own_etcd.nodes[0].freeze()
        try:
            waiting = asyncio.create_task(store.get("a"))
            await asyncio.sleep(0)
            async with asyncio.timeout(DEADLINE):
                await store.close()
                with pytest.raises(StoreError):
                    await waiting
        finally:
            own_etcd.nodes[0].thaw()


# ---- locked doors


async def test_user_and_password_and_a_token_that_runs_out(
    etcd: EtcdCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    with EtcdCluster(tmp_path / "etcd", flags=("--auth-token-ttl", "1")) as cluster:
        endpoint = [ETCDCTL, "--endpoints", f"127.0.0.1:{cluster.nodes[0].port}"]
        for words in (("user", "add", "root:right"), ("user", "grant-role", "root", "root"), ("auth", "enable")):
            await asyncio.to_thread(subprocess.check_output, [*endpoint, *words])
        monkeypatch.setenv("KEEPSTEP_ETCD_PASSWORD", "wrong")
        async with opened(f"{cluster.address}/t?user=root") as store:
            with pytest.raises(StoreError, match="authentication failed"):
                await store.get("a")
        (tmp_path / "password").write_text("right\n")
        monkeypatch.setenv("KEEPSTEP_ETCD_PASSWORD_FILE", str(tmp_path / "password"))
        async with opened(f"{cluster.address}/t?user=root") as store:
            await store.put("a", b"1")
            await asyncio.sleep(3)  # etcd counts the token's second itself, without an event
            await store.put("a", b"2")
            assert await store.get("a") == b"2"
        async with opened(f"{cluster.address}/t") as store:
            with pytest.raises(StoreError, match="user name is empty"):
                await store.get("a")


async def test_tls_with_a_client_certificate(etcd: EtcdCluster, tmp_path: Path):
    authority, stranger = trustme.CA(), trustme.CA()
    files = {"ca": tmp_path / "ca.pem", "cert": tmp_path / "client.pem", "key": tmp_path / "client.key"}
    authority.cert_pem.write_to_path(files["ca"])
    client = authority.issue_cert("client@keepstep.test")
    client.cert_chain_pems[0].write_to_path(files["cert"])
    client.private_key_pem.write_to_path(files["key"])
    server = authority.issue_cert("127.0.0.1")
    server.cert_chain_pems[0].write_to_path(tmp_path / "server.pem")
    server.private_key_pem.write_to_path(tmp_path / "server.key")
    stranger.cert_pem.write_to_path(tmp_path / "stranger.pem")
    flags = ("--cert-file", str(tmp_path / "server.pem"), "--key-file", str(tmp_path / "server.key"))
    flags += ("--client-cert-auth", "--trusted-ca-file", str(files["ca"]))
    with EtcdCluster(tmp_path / "etcd", flags=flags) as cluster:
        query = "&".join(f"{name}={path}" for name, path in files.items())
        async with opened(f"{cluster.address}/t?{query}") as store, store.watch("") as watch:
            await store.put("a", b"1")
            async with asyncio.timeout(DEADLINE):
                assert [change.value async for change in first(watch)] == [b"1"]
        for wrong in (f"ca={files['ca']}", query.replace("ca.pem", "stranger.pem")):
            async with opened(f"{cluster.address}/t?{wrong}") as store:
                with pytest.raises(StoreError, match="cannot read"):
                    await store.get("a")
        async with opened(f"{cluster.address}/t?ca={tmp_path}/nowhere.pem") as store:
            with pytest.raises(StoreError, match=r"nowhere\.pem"):
                await store.get("a")


async def first(watch: Watch) -> AsyncIterator[object]:
    async for change in watch:
        yield change
        return
