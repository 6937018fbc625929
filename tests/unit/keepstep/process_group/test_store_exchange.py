"""``create_store_client``, for process groups of a user's own."""

from __future__ import annotations

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from keepstep.process_group import create_store_client

SECONDS_10 = timedelta(seconds=10)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "[::1]"])
def test_the_store_of_an_address_is_that_under_its_prefix(host: str) -> None:
    if ":" in host and not socket.has_ipv6:
        pytest.skip("no IPv6")
    server = TCPStore(host.strip("[]"), 0, is_master=True, wait_for_workers=False)
    create_store_client(f"{host}:{server.port}/a/b", SECONDS_10).set("key", "value")
    assert server.get("a/b/key") == b"value"


@pytest.mark.parametrize("address", ["host/prefix", "host:port/prefix", "", ":1/prefix"])
def test_an_invalid_address_is_named(address: str) -> None:
    with pytest.raises(ValueError, match=r"invalid store address .* expected host:port/prefix"):
        create_store_client(address, SECONDS_10)
