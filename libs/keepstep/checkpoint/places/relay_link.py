"""Requests to the relay of a checkpoint, from several threads, repeated while the relay is away or busy."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar
from urllib.parse import quote

from keepstep.checkpoint.places.location import AtRelay
from keepstep.checkpointing.direct.connection import BrokenConnection, Connection, Deadline, Refusal
from keepstep.checkpointing.errors import TransferTimeout
from keepstep.checkpointing.relayed.relay_client import Credentials
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.security.tls import tls_of_client
from keepstep_mesh.security.tokens import ClientToken

T = TypeVar("T")

PATIENCE_SECONDS = 30.0
"""Without a byte for this long, a connection counts as broken."""
REQUEST_BACKOFF = Backoff(first=0.1, most=2.0)
BUSY = frozenset({408, 422, 500, 502, 503, 504})
"""Statuses of a relay, or of a proxy before it, that may accept the same request later. A relay that stops during a
commit answers 500."""

log = get_logger("keepstep.checkpoint")


class RelayLink:
    """Connections to one relay.

    Args:
        location: the checkpoint.
        deadline: of all requests together.
        token: token of the job. None: that of ``KEEPSTEP_TOKEN`` or ``KEEPSTEP_TOKEN_FILE``.
    """

    def __init__(self, location: AtRelay, deadline: Deadline, token: str | None = None) -> None:
        credentials = Credentials(ClientToken.of(token) if token else ClientToken(), tls_of_client())
        self._endpoint = credentials.endpoint(location.address)
        self.deadline = deadline
        self.all_path = f"/v1/jobs/{quote(location.job, safe='')}/checkpoints"
        self.path = f"{self.all_path}/{location.id}"
        self._lock = threading.Lock()
        self._free: list[Connection] = []

    def ask(self, request: Callable[[Connection], T]) -> T:
        """Return what ``request`` returns. Repeats it while the relay is away. No other thread uses its connection.

        Raises:
            Refusal: the relay refused it, for a reason that does not pass.
            TransferTimeout: the deadline passed.
        """
        failures, pause, reason = 0, 0.0, ""
        while True:
            try:
                if failures:
                    time.sleep(min(pause, self.deadline.remaining()))  # the relay may be restarting
                with self._connected() as connection:
                    return request(connection)
            except TransferTimeout as error:
                if not reason:
                    raise
                raise TransferTimeout(f"{error}; the relay failed {failures} times, at last: {reason}") from error
            except BrokenConnection as error:
                pause, reason = 0.0, str(error)
            except Refusal as error:
                if error.status not in BUSY:
                    raise
                pause, reason = error.retry_after, str(error)
            failures += 1
            if failures > 1:
                log.warning("relay failed a request; retrying", relay=self._endpoint.address, reason=reason)
            pause = min(max(pause, REQUEST_BACKOFF.seconds(failures)), REQUEST_BACKOFF.most)

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._lock:
            connection = self._free.pop() if self._free else None
        if connection is None:
            connection = Connection(self._endpoint, self.deadline, PATIENCE_SECONDS)
            try:
                connection.connect()
            except BaseException:
                connection.close()
                raise
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._free.append(connection)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            while self._free:
                self._free.pop().close()
