"""Connections to relays, and the one rule about requests that fail.

A request is sent again after a broken connection, after an answer that may be another one later (``BUSY``), and a few
times after bytes that arrived damaged. Of several relays, the next one gets it. It fails when every relay has refused
it, or at the deadline.
"""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TypeVar

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.relay_client.relay_paths import AtRelay
from keepstep.state.errors import TransferError, TransferTimeout
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.security.tls import TlsFiles, tls_of_client, watched_client_context
from keepstep_mesh.security.tokens import ClientToken, derived, place_of

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""Without a byte for this long, a connection counts as broken. Less, if another relay is left to ask in time."""
REQUEST_BACKOFF = Backoff(first=0.1, most=2.0)
BUSY = frozenset({408, 422, 500, 502, 503, 504})
"""Statuses of a relay, or of a proxy before it, that may accept the same request later. A relay that stops during a
commit answers 500."""

ABSENT = frozenset({404, 410})
"""Statuses of a relay that does not have what was asked for, and does not expect it."""
MAX_DAMAGES = 3
"""Times that the bytes of one request may arrive damaged from one relay."""

log = get_logger("keepstep.relay_client")


class Credentials:
    """The current token for relays, and the current TLS settings, for each new connection."""

    def __init__(self, token: ClientToken, tls: TlsFiles) -> None:
        self._token = token
        self._context = watched_client_context(tls)
        self._default: ssl.SSLContext | None = None

    def endpoint(self, address: str) -> Endpoint:
        """Return the endpoint of the relay at ``address``. Raises ``ValueError`` for an invalid address."""
        return Endpoint.of(address, partial(self._headers, place_of("relay", address)), self._tls)

    def _headers(self, place: str) -> Mapping[str, str]:
        token = self._token.latest()
        return {"Authorization": f"Bearer {derived(token, place)}"} if token else {}

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._default = self._default or TlsFiles().client_context()
            return self._default
        self._context.refresh()
        return self._context.value


class DamagedBytes(TransferError):
    """Bytes did not arrive as they were stored."""


class RelayLink:
    """Connections to relays that have the same checkpoint. A relay that fails is replaced by the next one.

    Safe to use from several threads: each request has a connection of its own.

    Args:
        relays: at least one.
        deadline: of all requests together.
        patience: seconds without a byte, after which a connection counts as broken.
        once: fail after the first failure of any kind.
        on_connected: called after each new connection.
    """

    def __init__(
        self,
        relays: Sequence[Endpoint],
        deadline: Deadline,
        *,
        patience: float = PATIENCE_SECONDS,
        once: bool = False,
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        self._relays = list({relay.address: relay for relay in relays}.values())
        self._place = 0
        """Of the relay that is asked, in a list that repeats."""
        self.deadline = deadline
        self._patience = patience
        self._once = once
        self._on_connected = on_connected
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._free: list[Connection] = []
        self._interrupted = threading.Event()

    def ask(self, request: Callable[[Connection], T]) -> T:
        """Return what ``request`` returns. No other thread uses its connection.

        Raises:
            TransferError: every relay refused it, for a reason that does not pass; mostly a ``Refusal``. Of several
                relays, this is one that may have what was asked for (``is_absent``), if any may.
            TransferTimeout: the deadline passed.
            BrokenConnection: the connection broke, with ``once``.
        """
        failures, pause, reason = 0, 0.0, ""
        refused: dict[str, TransferError] = {}
        damages = Counter[str]()
        while True:
            place = self._place
            relay = self._relays[place % len(self._relays)]
            try:
                if pause:
                    self.pause(pause)
                with self._connected(relay) as connection:
                    return request(connection)
            except TransferTimeout as error:
                if not reason:
                    raise
                raise TransferTimeout(f"{error}; the relay failed {failures} times, at last: {reason}") from error
            except (BrokenConnection, TransferError) as error:
                if self._interrupted.is_set():
                    raise TransferError("the transfer was aborted") from error
                if self._once:
                    raise
                failures += 1
                damages[relay.address] += isinstance(error, DamagedBytes)
                refused.pop(relay.address, None)
                if isinstance(error, TransferError) and not _passes(error, damages[relay.address]):
                    refused[relay.address] = error
                reason, after = str(error), getattr(error, "retry_after", 0.0)
            if len(refused) == len(self._relays):
                raise _joined(list(refused.values()))
            if failures > 1 or len(self._relays) > 1:
                log.warning("relay failed a request; retrying", relay=relay.address, reason=reason)
            with self._lock:
                if self._place == place:  # else another thread has chosen the next one
                    self._place += 1
            all_failed = failures % len(self._relays) == 0  # the relays may be restarting
            pause = min(max(after, REQUEST_BACKOFF.seconds(failures)), REQUEST_BACKOFF.most) if all_failed else 0.0

    def pause(self, seconds: float) -> None:
        """Wait, at most until the deadline. Raises ``TransferError`` if ``interrupt`` was called."""
        if self._interrupted.wait(min(seconds, self.deadline.remaining())):
            raise TransferError("the transfer was aborted")

    @contextlib.contextmanager
    def _connected(self, relay: Endpoint) -> Iterator[Connection]:
        with self._lock:
            connection = next((one for one in self._free if one.address == relay.address), None)
            if connection is not None:
                self._free.remove(connection)
        connection = connection or self._connect(relay)
        try:
            yield connection
        except BaseException:
            self._close(connection)
            raise
        with self._lock:
            self._free.append(connection)

    def _connect(self, relay: Endpoint) -> Connection:
        patience = self._patience
        if len(self._relays) > 1:
            patience = min(patience, self.deadline.seconds / (len(self._relays) + 1))
        connection = Connection(relay, self.deadline, patience)
        with self._lock:
            self._open.add(connection)
        try:
            if self._interrupted.is_set():
                raise BrokenConnection("interrupted")
            connection.connect()
        except BaseException:
            self._close(connection)
            raise
        self._on_connected()
        return connection

    def _close(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)
            connection.close()

    def interrupt(self) -> None:
        """End all requests, and refuse new ones. From any thread; does not wait."""
        self._interrupted.set()
        with self._lock:
            for connection in self._open:
                connection.interrupt()

    def close(self) -> None:
        """Close all connections that no request uses."""
        with self._lock:
            while self._free:
                connection = self._free.pop()
                self._open.discard(connection)
                connection.close()


def is_absent(error: BaseException) -> bool:
    """Return whether a relay does not have what was asked for, or not as it was stored."""
    return isinstance(error, DamagedBytes) or (isinstance(error, Refusal) and error.status in ABSENT)


def _passes(error: TransferError, damages: int) -> bool:
    if isinstance(error, DamagedBytes):
        return damages < MAX_DAMAGES
    return isinstance(error, Refusal) and error.status in BUSY


def _joined(errors: list[TransferError]) -> TransferError:
    """Return one of the errors, with the text of all."""
    chosen = next((one for one in errors if not is_absent(one)), errors[-1])
    if len(errors) > 1:
        chosen.args = ("; ".join(map(str, errors)),)
    return chosen


def link_to(location: AtRelay, deadline: Deadline, token: str | None) -> RelayLink:
    """Return a link to the relays of a checkpoint.

    Args:
        location: the checkpoint.
        deadline: of all requests together.
        token: token of the job. None: that of ``KEEPSTEP_TOKEN`` or ``KEEPSTEP_TOKEN_FILE``.
    """
    credentials = Credentials(ClientToken.of(token) if token else ClientToken(), tls_of_client())
    return RelayLink([credentials.endpoint(address) for address in (location.address, *location.others)], deadline)
