"""Refuse requests that are for another kind of service, and name the address of the right one.

The services of a mesh have some paths in common, such as ``/v1/jobs``. Without this check, a metrics service whose
address was given as the lighthouse's would answer with data of another form, or carry out an order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from ipaddress import ip_address
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from keepstep_mesh.errors import AuthError
from keepstep_mesh.net.addresses import in_url
from keepstep_mesh.net.http import KIND_HEADER, Problem
from keepstep_mesh.security.tokens import Access, Tokens

KINDS = {"lighthouse": "lighthouse", "relay": "relay", "metrics": "metrics service"}
"""Kinds of services, and their names for people."""


def only_for(
    kind: str, neighbours: Callable[[], Mapping[str, Sequence[str]]], tokens: Callable[[], Tokens]
) -> Middleware:
    """Return a middleware that refuses requests for another kind with ``Problem`` 421.

    Args:
        kind: kind of this service.
        neighbours: addresses of other services that it knows, by kind. Clients that may read learn them.
        tokens: the current tokens of this service.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        wanted = request.headers.get(KIND_HEADER, kind)
        if wanted == kind:
            return await handler(request)
        known = neighbours().get(wanted, ()) if _may_read(request, tokens()) else ()
        addresses = [as_seen_from(request.remote, request.url.host or "", one) for one in known]
        raise Problem(
            HTTPStatus.MISDIRECTED_REQUEST, _sentence(kind, wanted, addresses), service=kind, addresses=addresses
        )

    return check


def as_seen_from(client: str | None, here: str, address: str) -> str:
    """Return ``address`` in a form that the client can reach.

    An address on loopback is valid on this machine only. A client on another machine gets it with ``here`` as its host.

    Args:
        client: address of the client; None: unknown.
        here: host under which the client reached this machine.
        address: URL that this machine uses.
    """
    parts = urlsplit(address)
    if not here or not _is_loopback(parts.hostname) or _is_loopback(client):
        return address
    port = f":{parts.port}" if parts.port else ""
    return parts._replace(netloc=f"{in_url(here)}{port}").geturl()


def _sentence(kind: str, wanted: str, addresses: Sequence[str]) -> str:
    name = KINDS.get(wanted, repr(wanted[:40]))
    where = f"; the {name} is at {' or '.join(addresses)}" if addresses else ""
    return f"this is a {KINDS.get(kind, kind)}, not a {name}{where}"


def _may_read(request: web.Request, tokens: Tokens) -> bool:
    try:
        tokens.check(request.headers.get("Authorization"), Access.READ)
    except AuthError:
        return False
    return True


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False
