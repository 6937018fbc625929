"""Keep a service registered with a lighthouse: register, renew every third of the time to live, fail over.

The lighthouse sends the address of the service to workers.

    async with registered(lighthouses, Registration("relay", "relay-1", "http://10.0.0.7:29520"), token=token):
        ...
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

import aiohttp

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.net.http import Identity, answer_of_leader, leader_of, raise_for_problem, read_json_answer
from keepstep_mesh.net.lighthouse_addresses import Addresses
from keepstep_mesh.security.request_errors import explained
from keepstep_mesh.security.tls import TlsFiles, as_safe
from keepstep_mesh.security.tokens import ClientToken

REGISTRATION_SECONDS = 5.0
"""Limit of one request, but at most a third of the time to live."""
DEREGISTER_SECONDS = 2.0

log = get_logger("keepstep.registration")


@dataclass(frozen=True, slots=True)
class Registration:
    """``kind``: ``relay`` or ``metrics``. ``name``: unique among them, the same after a restart.

    ``address``: ``http://host:port`` for workers. ``ttl``: seconds after which a registration that is not renewed ends.
    ``details``: shown to operators, at most 4 KiB.
    """

    kind: str
    name: str
    address: str
    ttl: float = 15.0
    details: Mapping[str, str | float | bool | None] = field(default_factory=dict)


class Registrar:
    """Keeps one registration; created by ``registered``."""

    def __init__(
        self, lighthouses: Iterable[str], registration: Registration, identity: Identity, looks_for: str | None
    ) -> None:
        self.lighthouse: str | None = None
        """Address of the lighthouse that holds the registration; None: none."""
        self.trouble: str | None = "not registered yet"
        """Reason why the service is not registered, for ``/readyz`` and logs; None: it is."""
        self.known = asyncio.Event()
        """Set while the service is registered."""
        self.found: str | None = None
        """Address of a service of kind ``looks_for``, as of the last renewal."""
        self._registration = registration
        self._looks_for = looks_for
        self._identity = identity
        self._addresses = Addresses(lighthouses)
        self._interval = registration.ttl / 3
        self._failures_logged = LogLimiter(seconds=10.0)

    async def run(self) -> None:
        """Register and renew, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            delay, lighthouse = self._addresses.next(random.random())  # noqa: S311 - spreads clients
            await asyncio.sleep(delay)
            began = loop.time()
            try:
                seconds = min(REGISTRATION_SECONDS, self._interval)
                async with self._identity.session(timeout=seconds, kind="lighthouse") as http:
                    while True:
                        await self._put(http, lighthouse)
                        self._taken_by(lighthouse)
                        await self._look(http, lighthouse)
                        await asyncio.sleep(self._interval)
            except (aiohttp.ClientError, KeepstepError, TimeoutError, OSError) as error:
                self._failed(f"{lighthouse}: {explained(error, lighthouse)}")
                self._addresses.lost(lighthouse, loop.time() - began, silent=isinstance(error, TimeoutError))

    async def _put(self, http: aiohttp.ClientSession, lighthouse: str) -> None:
        what = self._registration
        body = {"address": what.address, "ttl_seconds": what.ttl, "details": dict(what.details)}
        async with http.put(f"{lighthouse}{self._path}", json=body, allow_redirects=False) as answer:
            if (leader := leader_of(answer)) is not None:
                self._addresses.follow(leader)
                raise ConnectionRefusedError(f"it does not lead; {leader} does")
            await raise_for_problem(answer)

    async def _look(self, http: aiohttp.ClientSession, lighthouse: str) -> None:
        if self._looks_for is None:
            return
        try:
            async with http.get(f"{lighthouse}/v1/cluster") as answer:
                await raise_for_problem(answer)
                services = (await read_json_answer(answer))["services"]
            addresses = (one["address"] for one in services if one["kind"] == self._looks_for)
            self.found = next((as_safe(one, lighthouse) for one in addresses), None)
        except (KeepstepError, TimeoutError, LookupError, TypeError, ValueError) as error:
            log.debug("could not read the services of the lighthouse", reason=explained(error, lighthouse))

    async def say_goodbye(self) -> None:
        """Deregister the service. Never raises: the registration also ends by itself."""
        if self.lighthouse is None:
            return
        try:
            async with (
                asyncio.timeout(DEREGISTER_SECONDS),
                self._identity.session(timeout=DEREGISTER_SECONDS) as http,
                answer_of_leader(http, "DELETE", self.lighthouse, self._path) as answer,
            ):
                await raise_for_problem(answer)
        except (aiohttp.ClientError, KeepstepError, TimeoutError, OSError) as error:
            log.info(
                "could not withdraw the registration",
                lighthouse=self.lighthouse,
                reason=str(error) or type(error).__name__,
            )

    @property
    def _path(self) -> str:
        return f"/v1/services/{quote(self._registration.kind)}/{quote(self._registration.name, safe='')}"

    def _taken_by(self, lighthouse: str) -> None:
        if self.lighthouse != lighthouse:
            log.info("registered", lighthouse=lighthouse, service=self._registration.name)
        self.lighthouse, self.trouble = lighthouse, None
        self._failures_logged.reset()
        self.known.set()

    def _failed(self, reason: str) -> None:
        self.lighthouse, self.trouble = None, f"no lighthouse accepted the registration ({reason})"
        self.known.clear()
        if self._failures_logged.allows(asyncio.get_running_loop().time()):
            log.warning("not registered; retrying", service=self._registration.name, reason=reason)


@contextlib.asynccontextmanager
async def registered(
    lighthouses: Iterable[str],
    registration: Registration,
    *,
    token: str | ClientToken | Callable[[], str | None] | None = None,
    tls: TlsFiles | None = None,
    looks_for: str | None = None,
) -> AsyncIterator[Registrar]:
    """Keep a service registered in the background while the context is open, then deregister it.

    Without a reachable lighthouse it retries; ``Registrar.trouble`` has the reason.

    Args:
        lighthouses: base URLs, at least one.
        registration: kind, name and address of the service.
        token: of the role service or admin, or a function that returns the current one.
        tls: certificates for https.
        looks_for: kind of service whose address ``Registrar.found`` has.

    Raises:
        ValueError: no lighthouse was given.
        TlsError: a certificate or key is invalid.
    """
    registrar = Registrar(lighthouses, registration, Identity(token, tls), looks_for)
    keeper = asyncio.create_task(registrar.run(), name=f"registration of {registration.name}")
    try:
        yield registrar
    finally:
        await cancelled(keeper)
        await registrar.say_goodbye()
