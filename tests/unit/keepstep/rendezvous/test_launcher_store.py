"""The launcher's store: who serves it, who joins it, and what ends a wait."""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from keepstep.rendezvous.launcher_store import LauncherStore, listens
from keepstep_mesh.errors import Banned, KeepstepError
from tests.support.network.ports import free_port

HOST = "127.0.0.1"
FIRST, SECOND = "g:1", "g:2"


@contextlib.contextmanager
def listening() -> Iterator[int]:
    """The port of a server that accepts connections and never answers."""
    with socket.create_server((HOST, 0)) as server:
        yield server.getsockname()[1]


def hosted() -> TCPStore:
    """A store that no rank serves."""
    return TCPStore(HOST, 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


def join(port: int, rank: int = 0, *, seconds: float = 60, agent_serves: bool = False) -> LauncherStore:
    deadline = time.monotonic() + seconds
    return LauncherStore(HOST, port, rank=rank, restart=0, agent_serves=agent_serves, deadline=deadline)


def test_rank_0_serves_a_store_that_nobody_serves() -> None:
    port = free_port()
    with listening() as server:
        rank_0 = join(port)
        rank_0.announce_rank_0(f"http://{HOST}:{server}", FIRST)
        assert join(port, 1).address_of_rank_0("g") == f"http://{HOST}:{server}"
    del rank_0
    assert not listens(HOST, port, 60)


def test_all_ranks_of_a_banned_group_learn_that_it_is_banned() -> None:
    port = free_port()
    with concurrent.futures.ThreadPoolExecutor() as pool:
        rank_0 = join(port)
        others = [pool.submit(join(port, rank).address_of_rank_0, "g") for rank in (1, 2)]
        rank_0.announce_ban("g is banned for 60 s more", 2)
        for one in others:
            with pytest.raises(Banned, match="banned for 60 s more"):
                one.result(60)
    assert not rank_0.store.check(["keepstep/0/group_server"]), "a later start of the group would find it"


def test_rank_0_joins_a_store_of_the_same_process() -> None:
    host = hosted()
    with listening() as server:
        join(host.port).announce_rank_0(f"http://{HOST}:{server}", FIRST)
        assert join(host.port, 1).address_of_rank_0("g") == f"http://{HOST}:{server}"
    assert host.check(["keepstep/0/group_server"])


def test_a_store_that_appears_between_probe_and_attempt_is_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    host = hosted()
    answers = [False, True]
    monkeypatch.setattr("keepstep.rendezvous.launcher_store.listens", lambda *_: answers.pop(0))
    join(host.port).store.set("key", "value")
    assert host.get("key") == b"value"
    assert answers == []


def test_rank_0_waits_for_the_store_of_an_agent() -> None:
    port = free_port()
    with pytest.raises(TimeoutError, match=f"rank 0 could not use the store .*{HOST}:{port}"):
        join(port, seconds=0.5, agent_serves=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        rank_0 = pool.submit(join, port, agent_serves=True)
        agent = TCPStore(HOST, port, None, is_master=True, wait_for_workers=False)
        rank_0.result(60).store.set("key", "value")
    assert agent.get("key") == b"value"


def test_a_second_rank_0_is_refused_in_a_store_that_the_first_serves() -> None:
    port = free_port()
    first = join(port)
    with pytest.raises(
        KeepstepError, match="is served by rank 0 of another group, or by that of this group before a restart"
    ):
        join(port)
    assert first.store.check(["keepstep/served_by"])


def test_a_second_rank_0_is_refused_while_the_first_is_at_work() -> None:
    host = hosted()
    with listening() as server, listening() as another:
        join(host.port).announce_rank_0(f"http://{HOST}:{server}", FIRST)
        with pytest.raises(KeepstepError, match="rank 0 of g:1 already uses the store of g:2 at"):
            join(host.port).announce_rank_0(f"http://{HOST}:{another}", SECOND)


def test_rank_0_replaces_an_entry_with_its_own_address() -> None:
    host = hosted()
    with listening() as server:
        join(host.port).announce_rank_0(f"http://{HOST}:{server}", FIRST)
        join(host.port).announce_rank_0(f"http://{HOST}:{server}", SECOND)
    assert host.get("keepstep/0/group_server").decode().endswith(SECOND)


def test_the_entry_of_a_life_that_ended_is_passed_over_and_replaced() -> None:
    host = hosted()
    join(host.port).announce_rank_0(f"http://{HOST}:{free_port()}", FIRST)
    with pytest.raises(TimeoutError, match=r"could not reach rank 0 .* rank 0 of g:1 does not listen"):
        join(host.port, 1, seconds=0.5).address_of_rank_0("g")
    with listening() as server, concurrent.futures.ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(join(host.port, 1).address_of_rank_0, "g")
        join(host.port).announce_rank_0(f"http://{HOST}:{server}", SECOND)
        assert rank_1.result(60) == f"http://{HOST}:{server}"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_server_that_is_no_store_ends_in_a_timeout(rank: int) -> None:
    with listening() as port:
        assert_times_out(lambda: join(port, rank, seconds=0.5))


def assert_times_out(work: Callable[[], Any]) -> None:
    with pytest.raises(TimeoutError, match="could not use the store of its group"):
        work()


def test_a_port_that_a_socket_only_holds_cannot_be_served() -> None:
    with socket.socket() as holder:
        holder.bind((HOST, 0))
        with pytest.raises(KeepstepError, match="rank 0 cannot serve the store of its group at"):
            join(holder.getsockname()[1])
