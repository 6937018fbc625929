"""An interrupted connection ends at once, whatever moment the interruption hits."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from keepstep.checkpointing.direct import connection as module
from keepstep.checkpointing.direct.connection import BrokenConnection, Connection, Deadline, Endpoint
from tests.services.relay_transport.scene import switched_off

PATIENCE = 20.0
"""A wait that was not interrupted ends with another error after this time."""


@pytest.mark.parametrize("connects", [False, True], ids=["before-the-connection", "while-it-is-made"])
def test_an_interrupted_connection_to_a_host_that_does_not_answer_ends(
    monkeypatch: pytest.MonkeyPatch, connects: bool
) -> None:
    class Interrupted(socket.socket):
        def connect_ex(self, address: Any) -> int:
            made = super().connect_ex(address) if connects else 0
            one.interrupt()
            return made or super().connect_ex(address)

    monkeypatch.setattr(module, "open_socket", Interrupted)
    with switched_off() as address:
        one = Connection(Endpoint.of(address, dict), Deadline(PATIENCE, "no answer"), PATIENCE)
        with pytest.raises(BrokenConnection, match="interrupted"):
            one.connect()
        one.close()
