"""The current token and certificate that a process shows to relays."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import partial

from keepstep.connection.http_connection import Endpoint
from keepstep_mesh.security.tls import TlsFiles, tls_of_client, watched_client_context
from keepstep_mesh.security.tokens import ClientToken, derived, place_of


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


def credentials_of(token: str | None) -> Credentials:
    """Return the credentials of a script. ``token``: None: that of ``KEEPSTEP_TOKEN`` or ``KEEPSTEP_TOKEN_FILE``."""
    return Credentials(ClientToken.of(token) if token else ClientToken(), tls_of_client())
