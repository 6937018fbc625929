"""A relay that tests register with lighthouses."""

from __future__ import annotations

import asyncio

from keepstep_mesh.discovery.registration import Registrar, Registration
from keepstep_mesh.protocol.messages import ServiceAddress
from tests.support.services.lighthouse_driver import DEADLINE

RELAY = Registration("relay", "relay-1", "http://10.0.0.7:29520", ttl=30.0, details={"chunks": "memory", "gib": 64})
TOLD = ServiceAddress("relay", "relay-1", "http://10.0.0.7:29520")


async def known(registrar: Registrar) -> None:
    async with asyncio.timeout(DEADLINE):
        await registrar.known.wait()
