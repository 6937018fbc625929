"""Our own address, as others reach it, and the addresses of others."""

from __future__ import annotations

import socket
import threading

import pytest

from keepstep_mesh.net.addresses import Lookup, address_towards, address_towards_any, in_url, outward_address
from tests.support.network.unanswered import unanswered_name


@pytest.mark.parametrize("peer", ["127.0.0.1", "http://127.0.0.1:29510", "https://127.0.0.1:1"])
def test_the_address_towards_this_machine_is_its_loopback(peer):
    assert address_towards(peer) == "127.0.0.1"
    assert address_towards("localhost") in {"127.0.0.1", "::1"}


def test_a_peer_that_cannot_be_resolved_is_an_error():
    with pytest.raises(OSError, match=r".+"):
        address_towards("http://nobody.invalid:29510")


def test_a_peer_that_cannot_be_resolved_leaves_it_to_the_others_and_to_the_default_route():
    assert address_towards_any(["http://nobody.invalid:1", "http://127.0.0.1:1"]) == "127.0.0.1"
    assert address_towards_any(["http://nobody.invalid:1"]) == outward_address()


def test_only_an_ipv6_address_gets_brackets():
    assert [in_url(host) for host in ("::1", "10.0.0.1", "a.example")] == ["[::1]", "10.0.0.1", "a.example"]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_an_address_is_there_at_once(host):
    assert [one[4][:2] for one in Lookup(host, 80).result(0)] == [(host, 80)]


@pytest.mark.parametrize(("host", "error"), [("nobody.invalid", socket.gaierror), ("a..b", UnicodeError)])
def test_a_host_that_is_none_is_an_error(host, error):
    with pytest.raises(error):
        Lookup(host, 80).result(60)


def test_a_name_that_nobody_answers_for_is_waited_for_as_long_as_was_said():
    with unanswered_name() as name, pytest.raises(TimeoutError, match=rf"the name {name} was not found within 0\.1 s"):
        Lookup(name, 80).result(0.1)


def test_a_wait_for_a_name_can_be_interrupted():
    with unanswered_name() as name:
        lookup = Lookup(name, 80)
        threading.Thread(target=lookup.interrupt).start()
        with pytest.raises(ConnectionAbortedError):
            lookup.result(60)
