"""Our own address, as others reach it."""

from __future__ import annotations

import pytest

from keepstep_mesh.addresses import address_towards, address_towards_any, in_url, outward_address


@pytest.mark.parametrize("peer", ["127.0.0.1", "http://127.0.0.1:29510", "https://127.0.0.1:1"])
def test_what_reaches_this_machine_is_its_loopback(peer):
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
