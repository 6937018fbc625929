"""The quorum without a Manager: torchft's coordination names on a real lighthouse."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from http import HTTPStatus

import pytest

from keepstep.coordination import LighthouseClient, LighthouseServer, ManagerClient, ManagerServer, Quorum
from keepstep_mesh.net.addresses import outward_address
from keepstep_mesh.testing import ChaosProxy, scripted_lighthouse
from tests.support.checkpoints.checkpoint_ends import eventually
from tests.support.network.certificates import Authority
from tests.support.network.namespaces import Namespaces, why_not
from tests.support.services.command import environment

LIMIT = timedelta(seconds=30)
TOKEN = "token-of-the-workers"


@contextlib.contextmanager
def closing_at_the_end(server: LighthouseServer) -> Iterator[LighthouseServer]:
    yield server
    server.shutdown()


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=20_000)
    yield server
    server.shutdown()


@pytest.fixture
def client(lighthouse) -> Iterator[LighthouseClient]:
    one = LighthouseClient(lighthouse.address(), LIMIT)
    yield one
    one.shutdown()


def test_two_replicas_meet_and_see_what_the_other_brought(client):
    client.heartbeat("a")
    client.heartbeat("b")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(client.quorum, name, LIMIT, f"http://{name}", f"store-{name}", 3, 2, data={"who": name})
            for name in "ab"
        ]
        first, second = [one.result(60) for one in asked]
    assert first == second
    assert first.quorum_id >= 1
    assert [(p.replica_id, p.address, p.store_address, p.step, p.world_size, p.data) for p in first.participants] == [
        (name, f"http://{name}", f"store-{name}", 3, 2, {"who": name}) for name in "ab"
    ]


def quorum_of_both(client: LighthouseClient, **each: object) -> Quorum:
    """One round of `a` and `b`; what `a` got."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(client.quorum, name, LIMIT, **each) for name in "ab"]
        of_a, _ = [one.result(60) for one in asked]
    return of_a


def test_an_unchanged_quorum_gives_the_same_list_object(client):
    first, second, third = [quorum_of_both(client, step=3) for _ in range(3)]
    assert first.participants is second.participants is third.participants
    later = quorum_of_both(client, step=4)
    assert later.quorum_id == first.quorum_id
    assert [one.step for one in first.participants] == [3, 3]
    assert [one.step for one in later.participants] == [4, 4]


def test_data_that_the_caller_changes_in_place_reaches_the_others(client):
    data = {"round": 1}
    quorum_of_both(client, data=data)
    data["round"] = 2
    assert [one.data for one in quorum_of_both(client, data=data).participants] == [{"round": 2}] * 2


def test_clients_share_one_thread_and_the_end_of_one_does_not_concern_the_other(lighthouse, client):
    other = LighthouseClient(lighthouse.address(), LIMIT)
    other.heartbeat("c")
    assert [one.name for one in threading.enumerate()].count("keepstep-lighthouse-clients") == 1
    other.shutdown()
    other.shutdown()
    with pytest.raises(RuntimeError, match="client shut down: create another client"):
        other.quorum("c", LIMIT)
    assert len(quorum_of_both(client).participants) == 2


def test_a_quorum_that_does_not_form_is_a_timeout_with_the_reason(client):
    with pytest.raises(TimeoutError, match="1 of at least 2 groups"):
        client.quorum("a", timedelta(milliseconds=300))


def test_a_request_that_timed_out_is_not_in_the_next_quorum(lighthouse, client):
    with pytest.raises(TimeoutError):
        client.quorum("a", timedelta(milliseconds=200))
    with pytest.raises(TimeoutError, match="1 of at least 2 groups"):
        client.quorum("b", timedelta(milliseconds=300))


def test_nobody_there_is_a_timeout_that_names_the_address():
    client = LighthouseClient("http://127.0.0.1:9", timedelta(milliseconds=300))
    try:
        with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:9"):
            client.heartbeat("a")
    finally:
        client.shutdown()


@pytest.mark.parametrize("harm", [ChaosProxy.refuse, ChaosProxy.freeze])
async def test_a_heartbeat_that_no_lighthouse_answers_is_a_timeout_and_the_next_one_may_work(lighthouse, harm):
    async with ChaosProxy.before(lighthouse.address()) as proxy:
        client = LighthouseClient(proxy.url, LIMIT)
        try:
            await asyncio.to_thread(client.heartbeat, "a")
            harm(proxy)
            with pytest.raises(TimeoutError, match=r"no answer within 0\.2 s"):
                await asyncio.to_thread(client.heartbeat, "a", timedelta(milliseconds=200))
            proxy.accept()
            proxy.thaw()
            await asyncio.to_thread(client.heartbeat, "a", LIMIT)
        finally:
            await asyncio.to_thread(client.shutdown)


async def test_a_session_that_is_not_welcomed_holds_up_no_other_name():
    async with scripted_lighthouse() as lighthouse:
        client = LighthouseClient(lighthouse.url, LIMIT)
        try:
            waiting = asyncio.create_task(asyncio.to_thread(client.heartbeat, "a"))
            door = await lighthouse.session(welcome_epoch=None)
            other = asyncio.create_task(asyncio.to_thread(client.heartbeat, "b", LIMIT))
            await lighthouse.session()
            await other
            assert not waiting.done()
            door.welcome()
            await waiting
        finally:
            await asyncio.to_thread(client.shutdown)


def test_a_join_timeout_of_0_waits_for_nobody():
    server = LighthouseServer("127.0.0.1:0", min_replicas=2, join_timeout_ms=0)
    client = LighthouseClient(server.address(), LIMIT)
    try:
        client.heartbeat("does not ask")
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            for asked in [pool.submit(client.quorum, name, LIMIT) for name in "ab"]:
                assert len(asked.result(60).participants) == 2
    finally:
        client.shutdown()
        server.shutdown()


def test_a_heartbeat_timeout_in_which_nobody_could_beat_is_refused():
    with pytest.raises(ValueError, match="heartbeat_timeout must be at least"):
        LighthouseServer("127.0.0.1:0", min_replicas=1, heartbeat_timeout_ms=0)


def test_the_lighthouse_and_its_client_take_their_certificates_from_the_environment(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    mine = authority.client()
    for name, file in (
        ("KEEPSTEP_LIGHTHOUSE_TLS_CERT", authority.certificate("127.0.0.1")),
        ("KEEPSTEP_LIGHTHOUSE_TLS_CA", authority.pem),
        ("KEEPSTEP_TLS_CERT", mine.cert),
        ("KEEPSTEP_TLS_CA", authority.pem),
    ):
        monkeypatch.setenv(name, str(file))
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=1)
    client = LighthouseClient(lighthouse.address(), LIMIT)
    try:
        assert lighthouse.address().startswith("https://")
        assert client.quorum("a", LIMIT).quorum_id == 1
    finally:
        client.shutdown()
        lighthouse.shutdown()


@pytest.mark.parametrize("bind", ["[::]:0", "0.0.0.0:0"])
def test_all_interfaces_are_this_machine_until_a_token_is_set(bind, monkeypatch, caplog):
    with closing_at_the_end(LighthouseServer(bind, min_replicas=1)) as server:
        assert server.address().startswith("http://127.0.0.1:")
    assert "listening on this machine only, because no token is set" in caplog.text
    monkeypatch.setenv("KEEPSTEP_LIGHTHOUSE_INSECURE", "1")
    with closing_at_the_end(LighthouseServer(bind, min_replicas=1)) as server:
        assert server.address() == f"http://{outward_address()}:{server.address().rpartition(':')[2]}"
    monkeypatch.setenv("KEEPSTEP_LIGHTHOUSE_ADVERTISE", "head.example:29510")
    with closing_at_the_end(LighthouseServer(bind, min_replicas=1)) as server:
        assert server.address() == "http://head.example:29510"


ON_THE_HEAD = """
import sys
from keepstep.coordination import LighthouseServer
server = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=100, quorum_tick_ms=100,
                          heartbeat_timeout_ms=5000)
print(server.address(), flush=True)
sys.stdin.read()
server.shutdown()
"""


@pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")
def test_the_address_of_all_interfaces_reaches_the_lighthouse_from_another_host(monkeypatch):
    """As Ray Train's TorchftConfig starts it, on the head node."""
    with Namespaces() as network:
        head = network.host("head")
        server = subprocess.Popen(
            [*head.command, sys.executable, "-c", ON_THE_HEAD],
            env=environment(KEEPSTEP_WORKER_TOKEN=TOKEN),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout is not None
        address = server.stdout.readline().strip()
        assert address.startswith(f"http://{head.address}:")
        monkeypatch.setenv("KEEPSTEP_TOKEN", TOKEN)
        client = LighthouseClient(address, LIMIT)
        try:
            assert client.quorum("a", LIMIT).quorum_id >= 1
        finally:
            client.shutdown()
            server.communicate(timeout=60)
        assert server.returncode == 0


def test_a_port_that_is_none_is_refused_and_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(ValueError, match="not an address to listen on"):
        ManagerServer("a", "http://127.0.0.1:9", "127.0.0.1", "[::]:http", "", 1, LIMIT, LIMIT, 0)
    assert threading.active_count() == before


@pytest.mark.parametrize("restart", ["0", "3"])
def test_groups_of_two_ranks_plan_heal_and_commit_through_their_managers(monkeypatch, restart):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restart)
    lighthouse = LighthouseServer("127.0.0.1:0", min_replicas=2)
    both_there = threading.Barrier(2)

    def group(name: str) -> list[object]:
        server = ManagerServer(name, lighthouse.address(), "127.0.0.1", "127.0.0.1:0", "", 2, LIMIT, LIMIT, 0)
        client = ManagerClient(server.address(), LIMIT)
        try:
            both_there.wait(30)
            with concurrent.futures.ThreadPoolExecutor(2) as pool:
                step = 5 if name == "a" else 0
                asked = [pool.submit(client.quorum, rank, step, f"{name}{rank}", False, LIMIT) for rank in (0, 1)]
                plans = [one.result(60) for one in asked]
                votes = [pool.submit(client.should_commit, rank, 5, rank == 0, LIMIT) for rank in (0, 1)]
                decided = [one.result(60) for one in votes]
            metadata = client.checkpoint_metadata(1, LIMIT)
            both_there.wait(30)
            return [*plans, decided, metadata]
        finally:
            client.shutdown()
            server.shutdown()

    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            a, b = [one.result(90) for one in [pool.submit(group, name) for name in "ab"]]
    finally:
        lighthouse.shutdown()
    assert a[0] == a[1]
    assert (a[0].heal, a[0].recover_dst_replica_ranks, a[0].max_step, a[0].max_world_size) == (False, [1], 5, 1)
    assert (b[0].heal, b[0].recover_src_replica_rank, b[0].replica_rank, b[0].max_replica_rank) == (True, 0, 1, None)
    assert b[0].recover_src_manager_address.startswith("http://127.0.0.1:")
    assert (a[2], b[2]) == ([False, False], [False, False]), "one rank voted no"
    assert (a[3], b[3]) == ("a1", "b1")


NO_TORCH = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, NoTorch())
"""


def test_coordination_works_without_torch_and_the_rest_says_what_to_install():
    program = NO_TORCH + (
        "from datetime import timedelta\n"
        "from keepstep.coordination import LighthouseClient, LighthouseServer\n"
        "server = LighthouseServer('127.0.0.1:0', min_replicas=1)\n"
        "client = LighthouseClient(server.address(), timedelta(seconds=20))\n"
        "print(len(client.quorum('a', timedelta(seconds=20)).participants))\n"
        "client.shutdown(); server.shutdown()\n"
        "import keepstep\n"
        "try:\n    keepstep.Manager\nexcept ImportError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "1",
        "keepstep.Manager needs torch: pip install 'keepstep[train]'",
    ]


def test_a_replica_that_is_silent_for_the_heartbeat_timeout_is_dead_though_its_client_is_connected():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            closing_at_the_end(LighthouseServer("127.0.0.1:0", 1, join_timeout_ms=100, heartbeat_timeout_ms=200))
        )
        client = LighthouseClient(server.address(), LIMIT)
        stack.callback(client.shutdown)
        client.heartbeat("silent")
        assert [one.replica_id for one in client.quorum("silent", LIMIT).participants] == ["silent"]
        # half of two connected replicas is no majority, so this waits until the other one is dead
        assert [one.replica_id for one in client.quorum("probe", LIMIT).participants] == ["probe"]
        assert "silent" in [one.replica_id for one in client.quorum("silent", LIMIT).participants], "it is back"


def test_a_replica_that_waits_for_a_quorum_is_alive_longer_than_the_heartbeat_timeout():
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            closing_at_the_end(LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=100, heartbeat_timeout_ms=1000))
        )
        client = LighthouseClient(server.address(), LIMIT)
        stack.callback(client.shutdown)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            waits = pool.submit(client.quorum, "a", LIMIT)
            try:
                eventually(lambda: state_of(server, "a") == "asking")
                client.heartbeat("silent")
                eventually(lambda: state_of(server, "silent") in ("gone", "unknown"))
                assert state_of(server, "a") == "asking"
            finally:
                second = client.quorum("b", LIMIT)
            assert second == waits.result(60)


def state_of(server: LighthouseServer, name: str) -> str:
    try:
        with urllib.request.urlopen(f"{server.address()}/v1/jobs/default/replicas/{name}", timeout=30) as answer:
            state: str = json.load(answer)["state"]
            return state
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.NOT_FOUND:
            raise
        return "unknown"
