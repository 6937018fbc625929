"""Hosts in network namespaces: they reach each other, a cut drops all packets, and clean-up leaves nothing."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest

from tests.support.network.namespaces import Host, Namespaces, why_not
from tests.support.services.command import killed_at_the_end

DEADLINE = 30.0

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"{why_not()}")

ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 7))
while True:
    peer, _ = server.accept()
    while data := peer.recv(100):
        peer.sendall(data)
"""
ASK = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 7), timeout=30)
for line in sys.stdin:
    peer.sendall(line.encode())
    print(peer.recv(100).decode(), end="", flush=True)
"""


@pytest.fixture
def network() -> Iterator[Namespaces]:
    with Namespaces() as network:
        yield network


def on(host: Host, script: str, address: str) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    command = (*host.command, sys.executable, "-u", "-c", script, address)
    return killed_at_the_end(*command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)


async def until_listening(host: Host) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                _, writer = await asyncio.open_connection(host.address, 7)
            except OSError:
                await asyncio.sleep(0.02)  # the port is the only sign of it
            else:
                writer.close()
                await writer.wait_closed()
                return


async def reply(process: asyncio.subprocess.Process, text: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(text)
    await process.stdin.drain()
    async with asyncio.timeout(DEADLINE):
        return await process.stdout.readline()


async def test_a_cut_holds_back_the_packets_of_two_hosts_only(network: Namespaces) -> None:
    server, near, far = [network.host(name) for name in ("server", "near", "far")]
    async with on(server, ECHO, server.address):
        await until_listening(server)
        # the server takes one connection at a time, so the second begins when the first has ended
        async with on(near, ASK, server.address) as asker:
            assert await reply(asker, b"before\n") == b"before\n"
            network.cut("server", "near")
            answer = asyncio.create_task(reply(asker, b"during\n"))
            done, _ = await asyncio.wait([answer], timeout=0.5)  # no event shows that nothing arrives
            assert not done
            network.mend()
            assert await answer == b"during\n"
        network.cut("server", "near")
        async with on(far, ASK, server.address) as asker:
            assert await reply(asker, b"others\n") == b"others\n"


def test_processes_on_a_host_end_with_it() -> None:
    with Namespaces() as network:
        host = network.host("a")
        left = subprocess.Popen([*host.command, "sleep", "1000"])
        assert Path(host.namespace).exists()
    assert left.wait(DEADLINE) == -signal.SIGKILL
    assert not Path(host.namespace).exists()


def test_the_next_process_removes_the_hosts_of_a_killed_one() -> None:
    script = "import os, signal; from tests.support.network import namespaces as n; x = n.Namespaces().__enter__()"
    script += "; h = x.host('a').namespace; print(h)"
    script += "; import sys; sys.stdout.flush(); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        stdout=subprocess.PIPE,
        timeout=DEADLINE,
        check=False,
    )
    left = Path(done.stdout.decode().strip())
    assert done.returncode == -signal.SIGKILL
    assert left.name.endswith("-a")
    with Namespaces():  # another process may have removed it already
        assert not left.exists()
