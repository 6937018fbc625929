"""Requests to the relays of a checkpoint, from several threads, repeated while a relay is away or busy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import quote

from keepstep.checkpoint.places.location import AtRelay
from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.state.errors import TransferTimeout
from keepstep.transfer.relayed.relay_client import Credentials
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.security.tls import tls_of_client
from keepstep_mesh.security.tokens import ClientToken

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""Without a byte for this long, a connection counts as broken. Less, if another relay is left to ask in time."""
REQUEST_BACKOFF = Backoff(first=0.1, most=2.0)
BUSY = frozenset({408, 422, 500, 502, 503, 504})
"""Statuses of a relay, or of a proxy before it, that may accept the same request later. A relay that stops during a
commit answers 500."""

log = get_logger("keepstep.checkpoint")


class RelayLink:
    """Connections to the relays of one checkpoint. A relay that fails is replaced by the next one, for all threads.

    Args:
        location: the checkpoint.
        deadline: of all requests together. Each request that succeeds counts as progress.
        token: token of the job. None: that of ``KEEPSTEP_TOKEN`` or ``KEEPSTEP_TOKEN_FILE``.
    """

    def __init__(self, location: AtRelay, deadline: Deadline, token: str | None = None) -> None:
        credentials = Credentials(ClientToken.of(token) if token else ClientToken(), tls_of_client())
        self._relays = [credentials.endpoint(address) for address in (location.address, *location.others)]
        self._place = 0
        """Of the relay that is asked, in a list that repeats."""
        self.deadline = deadline
        self.all_path = f"/v1/jobs/{quote(location.job, safe='')}/checkpoints"
        self.path = f"{self.all_path}/{location.id}"
        self._lock = threading.Lock()
        self._free: list[Connection] = []

    def ask(self, request: Callable[[Connection], T]) -> T:
        """Return what ``request`` returns. Repeats it while the relays are away. No other thread uses its connection.

        Raises:
            Refusal: every relay refused it, for a reason that does not pass.
            TransferTimeout: the deadline passed.
        """
        failures, refused, pause, reason = 0, 0, 0.0, ""
        while True:
            try:
                if failures and failures % len(self._relays) == 0:
                    time.sleep(min(pause, self.deadline.remaining()))  # the relays may be restarting
                place = self._place
                with self._connected() as connection:
                    result = request(connection)
                self.deadline.progressed()
                return result
            except TransferTimeout as error:
                if not reason:
                    raise
                raise TransferTimeout(f"{error}; the relay failed {failures} times, at last: {reason}") from error
            except BrokenConnection as error:
                pause, reason = 0.0, str(error)
            except Refusal as error:
                refused += error.status not in BUSY
                if refused >= len(self._relays):
                    raise
                pause, reason = error.retry_after, str(error)
            failures += 1
            if failures > 1 or len(self._relays) > 1:
                log.warning("relay failed a request; retrying", relay=self._relay(place).address, reason=reason)
            pause = min(max(pause, REQUEST_BACKOFF.seconds(failures)), REQUEST_BACKOFF.most)
            self._leave(place)

    def _relay(self, place: int) -> Endpoint:
        return self._relays[place % len(self._relays)]

    def _leave(self, place: int) -> None:
        """Ask the next relay from now on, unless another thread has seen to that."""
        with self._lock:
            if self._place == place:
                self._place += 1

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._lock:
            relay = self._relay(self._place)
            free = next((one for one in self._free if one.address == relay.address), None)
            if free is not None:
                self._free.remove(free)
        connection = free or self._connect(relay)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._free.append(connection)

    def _connect(self, relay: Endpoint) -> Connection:
        patience = PATIENCE_SECONDS
        if len(self._relays) > 1:
            patience = min(patience, self.deadline.seconds / (len(self._relays) + 1))
        connection = Connection(relay, self.deadline, patience)
        try:
            connection.connect()
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            while self._free:
                self._free.pop().close()
