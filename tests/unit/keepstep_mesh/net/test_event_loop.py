"""How the event loop of services and trainers finds addresses."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keepstep_mesh.net.event_loop import new_event_loop

PROGRAM = """
import os, sys
from keepstep_mesh.net.event_loop import new_event_loop
loop = new_event_loop()
loop.run_until_complete(loop.getaddrinfo("localhost", 80))
child = os.fork()
if child == 0:
    sys.exit(7)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = new_event_loop()
    yield made
    made.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_an_address_and_a_name_are_found(loop, host):
    found = loop.run_until_complete(loop.getaddrinfo(host, 80, family=socket.AF_INET, type=socket.SOCK_STREAM))
    assert [address for *_, address in found] == [("127.0.0.1", 80)]


def test_a_name_that_is_not_known_raises(loop):
    with pytest.raises(socket.gaierror):
        loop.run_until_complete(loop.getaddrinfo("no-such-host.invalid", 80))


def test_a_forked_child_of_a_process_that_looked_a_name_up_ends_as_it_should():
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], timeout=60, check=False)
    assert ended.returncode == 7
