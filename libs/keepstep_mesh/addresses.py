"""Our own address, as others reach it, and hosts as URLs write them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit


def in_url(host: str) -> str:
    """``host`` with the brackets that an IPv6 address needs before ``:port``."""
    return f"[{host}]" if ":" in host else host


def address_towards(peer: str) -> str:
    """Address of our interface that reaches ``peer``, a host or a URL; nothing is sent. OSError when none does.

    A host name would do only where every machine resolves every other's; this works wherever ``peer`` is reached.
    """
    host = (urlsplit(peer).hostname or "127.0.0.1") if "//" in peer else peer
    for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {peer}: give a `hostname` that peers can reach")


def address_towards_any(peers: Iterable[str]) -> str:
    """Address of our interface that reaches the first of ``peers`` that has one; ``outward_address`` while none has.

    The name of a service that is only being started may not be known yet.
    """
    for peer in peers:
        with contextlib.suppress(OSError):
            return address_towards(peer)
    return outward_address()


def reachable(url: str) -> str:
    """``url`` of a server of ours, with our outward address in the place of one that means all interfaces."""
    host = urlsplit(url).hostname or ""
    if host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return url
    return url.replace(in_url(host), outward_address())


def outward_address() -> str:
    """Address of the interface with the default route, loopback when there is none. Sends nothing."""
    try:
        return address_towards("192.0.2.1")  # TEST-NET-1: routed like any address, owned by nobody
    except OSError:
        return "127.0.0.1"
