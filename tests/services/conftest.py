"""What tests of several services share."""

from __future__ import annotations

import pytest
from tests.services.checkpoint_peer import MINUTE

from keepstep.checkpointing import HTTPTransport


@pytest.fixture
def transports():
    """Makes transports on loopback and shuts them down."""
    made = []

    def make(num_chunks=0, timeout=MINUTE, token=None):
        made.append(HTTPTransport(timeout, num_chunks, hostname="127.0.0.1", token=token))
        return made[-1]

    yield make
    for transport in made:
        transport.shutdown()
