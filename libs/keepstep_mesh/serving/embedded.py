"""A service on the current event loop, started and stopped by its owner instead of a signal."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from urllib.parse import urlsplit

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.addresses import in_url, reachable
from keepstep_mesh.security.tokens import is_loopback, place_of
from keepstep_mesh.serving.listen_settings import ListenSettings
from keepstep_mesh.serving.service import Endpoint, Service, serving_with

log = get_logger("keepstep.service")


class Embedded(ABC):
    """Base of the embedded services. ``name`` appears in messages."""

    def __init__(self, name: str, settings: ListenSettings) -> None:
        self._name = name
        self._listen_settings = settings
        self._life: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._listening = asyncio.Event()
        self._endpoint: Endpoint | None = None
        self.known_address = ""
        """The address that others use, once it listens."""
        self._places: tuple[str, ...] = ()

    @abstractmethod
    def service(self) -> Service:
        """Create the service; its ``listening`` must be ``self._listens``."""

    async def start(self) -> None:
        """Start to listen. Raises ``KeepstepError`` or ``ValueError`` with what to do."""
        listens: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(listens), name=f"keepstep {self._name}")
        try:
            self._endpoint = await listens
        except BaseException:
            self._life.cancel()
            await asyncio.wait([self._life])
            raise

    async def _live(self, listens: asyncio.Future[Endpoint]) -> None:
        """Run in a task of its own, because different tasks may call ``start`` and ``stop``."""
        try:
            async with serving_with(self.service(), self._listen_settings) as endpoint:
                listens.set_result(endpoint)
                await self._stopped.wait()
        except Exception as error:
            if listens.done():
                raise
            listens.set_exception(error)

    async def stop(self) -> None:
        """Stop the service. Does nothing if it is not running."""
        self._stopped.set()
        if self._life is not None:
            await self._life

    @property
    def address(self) -> str:
        """URL with the real port; ``https`` with TLS."""
        if self._endpoint is None:
            raise RuntimeError(f"the {self._name} is not started; await start() first")
        return self._endpoint.url

    def _listens(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        settings = self._listen_settings
        self.known_address = settings.advertise or reachable(endpoint.url, settings.beside)
        if self.known_address != endpoint.url and is_loopback(urlsplit(self.known_address).hostname or ""):
            log.warning(
                "no address found at which other machines reach this service; set --advertise if they use it",
                listens=endpoint.url,
                advertises=self.known_address,
            )
        hosts = [*settings.allow_host, *(("localhost",) if is_loopback(endpoint.host) else ())]
        if endpoint.near_url == endpoint.url:  # not every interface
            hosts.append(endpoint.host)
        addresses = (self.known_address, *(f"//{in_url(host)}:{endpoint.port}" for host in hosts))
        self._places = tuple(dict.fromkeys(place_of(self._name, address) for address in addresses))
        self._listening.set()

    def places(self) -> tuple[str, ...]:
        """The places of a service that registers (``tokens.place_of``)."""
        return self._places
