"""The port that several processes of a relay share."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Never

import pytest

from keepstep_relay.processes import shared_port
from keepstep_relay.processes.main_process import Processes
from keepstep_relay.processes.shared_port import SharedPort
from tests.support.services.lighthouse_driver import eventually


class FullListener(socket.socket):
    """A listening socket of a process that has no descriptors left."""

    failures = 0

    def accept(self) -> Never:
        self.failures += 1
        raise OSError("planted: too many open files")


async def test_connections_that_cannot_be_accepted_are_logged_at_once_and_then_rarely(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shared_port, "ACCEPT_RETRY_SECONDS", 0.001)
    listener: Any = FullListener()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    port = SharedPort(asyncio.Protocol, listener, 1.0, processes=Processes(0, lambda _: None))
    await port.open(None)
    with socket.create_connection(listener.getsockname()):
        await eventually(lambda: listener.failures > 3)
    port.close()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "reason=planted: too many open files" in line
