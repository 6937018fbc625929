"""The relays that store the durable checkpoints of a job."""

from __future__ import annotations

from keepstep.checkpoint.managed.stored_states import StoredStates
from keepstep.connection.http_connection import Endpoint
from keepstep.group.group_link import LinkSettings
from keepstep.group.ranks.rank_link import RankLink
from keepstep.lifecycle.manager_settings import DurableSettings
from keepstep.relay_client.relay_link import Credentials
from keepstep_mesh.security.tls import TlsFiles, as_safe
from keepstep_mesh.security.tokens import ClientToken


class JobRelays:
    """Those that the settings name, or those that are registered with the lighthouse.

    Args:
        own: settings of this rank.
        durable: settings of the checkpoints.
        link: of this rank.
    """

    def __init__(self, own: LinkSettings, durable: DurableSettings, link: RankLink) -> None:
        self._own = own
        self._durable = durable
        self._link = link
        self._token = ClientToken.of(own.token)
        self._credentials = Credentials(self._token, own.session.tls or TlsFiles())

    def known(self) -> dict[str, Endpoint]:
        """Return the relays that may store checkpoints, by address."""
        addresses = self._durable.relays or self._registered().values()
        return {address: self._credentials.endpoint(address) for address in addresses}

    def _registered(self) -> dict[str, str]:
        """Return the addresses of the relays that are registered with the lighthouse, by name."""
        lighthouse = self._own.session.addresses[0]
        return {one.name: as_safe(one.address, lighthouse) for one in self._link.services if one.service == "relay"}

    def _absent(self) -> tuple[str, ...]:
        """Return the relays that committed the newest checkpoint, and are not registered."""
        if self._durable.relays:
            return ()
        registered = self._registered()
        return tuple(name for name in self._link.durable_relays if name not in registered)

    def tell_lighthouse(self, addresses: tuple[str, ...]) -> None:
        """Let the lighthouse know which relays have the newest checkpoint, for the next life of the job."""
        if not self._durable.relays and self._own.rank == 0:
            names = (name for name, address in self._registered().items() if address in addresses)
            self._link.stored_at(tuple(sorted(names)))

    def stored_states(self, rank: int, world_size: int, seconds: float) -> StoredStates:
        """Return the checkpoints, for one of ``world_size`` ranks that store a state together.

        Args:
            rank: among them.
            world_size: their number.
            seconds: time without progress after which a load fails.
        """
        return StoredStates(
            *(self._own.job, rank, world_size),
            relays=self.known,
            absent=self._absent,
            endpoint=self._credentials.endpoint,
            token=self._token.latest,
            copies=self._durable.copies,
            connect_seconds=self._own.session.connect_timeout,
            resume_wait=self._durable.resume_wait,
            seconds=seconds,
        )
