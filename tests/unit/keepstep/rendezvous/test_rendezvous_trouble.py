"""Hosts of a rendezvous that come up late, never answer, or die."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest

from keepstep.rendezvous.store_client import (
    KeyValueServer,
    RendezvousAbortedError,
    RendezvousError,
    RendezvousStore,
)
from tests.support.network.unanswered import unanswered_name
from tests.unit.keepstep.rendezvous.rendezvous_driver import LONG, NEW, begun, call, served


async def test_a_host_that_comes_up_late_is_met() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    store = RendezvousStore(f"127.0.0.1:{port}", NEW, timeout=timedelta(seconds=30))
    waiting = await begun(call(store.set, "key", b"value"))
    async with served(KeyValueServer(), port):
        await waiting
        assert await call(store.get, "key") == b"value"
        store.close()


async def timeout_and_abort(address: str) -> tuple[str, str]:
    """Return the errors of a wait that times out, and of one that is aborted."""
    with pytest.raises(TimeoutError) as timeout:
        await call(RendezvousStore(address, NEW, timeout=timedelta(seconds=0.1)).get, "key")
    store = RendezvousStore(address, NEW, timeout=LONG)
    waiting = await begun(call(store.get, "key"))
    store.abort("enough")
    with pytest.raises(RendezvousAbortedError) as aborted:
        await waiting
    return str(timeout.value), str(aborted.value)


async def test_a_host_that_never_comes_up_is_a_timeout_and_can_be_aborted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    timeout, aborted = await timeout_and_abort(address)
    assert "was not reachable in time" in timeout
    assert "enough" in aborted


async def test_a_host_whose_name_nobody_answers_for_is_a_timeout_and_can_be_aborted() -> None:
    with unanswered_name() as name:
        timeout, aborted = await timeout_and_abort(f"{name}:80")
    assert f"the name {name} was not found" in timeout
    assert "enough" in aborted


async def test_a_host_that_dies_is_an_error_at_once() -> None:
    async with served(KeyValueServer()) as address:
        store = RendezvousStore(address, NEW, timeout=LONG)
        await call(store.set, "key", b"")
    with pytest.raises(RendezvousError, match="lost the rendezvous host"):
        await call(store.get, "other")
    store.close()


async def test_a_host_that_accepts_and_says_nothing_is_a_timeout_and_can_be_aborted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        timeout, aborted = await timeout_and_abort(f"127.0.0.1:{silent.getsockname()[1]}")
    assert "did not answer" in timeout
    assert "enough" in aborted
