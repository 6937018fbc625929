"""Which process answers at an address, as this process sees it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from keepstep_chaos.observing.process_table import listener
from keepstep_mesh.net.addresses import outward_address

LISTEN = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
print(server.getsockname()[1], flush=True)
server.accept()
"""
ELSEWHERE = ["unshare", "--user", "--map-current-user", "--net"]


def no_namespace() -> bool:
    with contextlib.suppress(OSError):
        return subprocess.run([*ELSEWHERE, "true"], capture_output=True, check=False).returncode != 0
    return True


@contextlib.contextmanager
def listening(port: int, *before: str) -> Iterator[tuple[int, int]]:
    """A process that listens at all addresses, and its port."""
    command = [*before, sys.executable, "-c", LISTEN, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.skipif(no_namespace(), reason="this user may not make a network namespace")
def test_a_process_of_another_network_namespace_does_not_answer_at_the_same_port_here() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with listening(port, *ELSEWHERE) as (theirs, _):
        for host in ("127.0.0.1", "localhost", "", outward_address()):
            assert listener(host, port) is None, host
        with listening(port) as (ours, _):
            assert ours != theirs
            for host in ("127.0.0.1", "localhost", "", outward_address()):
                assert listener(host, port) == ours, host


def test_a_process_at_all_addresses_of_this_machine_is_not_the_one_of_another_machine() -> None:
    with listening(0) as (ours, port):
        assert listener("127.0.0.1", port) == ours
        assert listener("192.0.2.1", port) is None
        assert listener("host.invalid", port) is None
