"""Our own address, as others reach it, those of others, and hosts as URLs write them."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any
from urllib.parse import urlsplit

from keepstep_mesh.threads.starting import Thread


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
    """Return the address of the interface with the default route, else loopback. Sends nothing."""
    try:
        return address_towards("192.0.2.1")  # TEST-NET-1: routed like any address, but unused
    except OSError:
        return "127.0.0.1"


class Lookup:
    """The TCP addresses of a host, as ``socket.getaddrinfo`` gives them.

    That call has no deadline and cannot be interrupted, so a daemon thread makes it, unless ``host`` is an address.
    """

    def __init__(self, host: str, port: int) -> None:
        self._to = host, port
        self._found: Future[list[Any]] = Future()
        try:
            self._found.set_result(self._look(socket.AI_NUMERICHOST))
        except (OSError, ValueError):
            Thread(target=self._look_up, name="keepstep-lookup", daemon=True).start()

    def _look(self, flags: int = 0) -> list[Any]:
        return [*socket.getaddrinfo(*self._to, type=socket.SOCK_STREAM, flags=flags)]

    def _look_up(self) -> None:
        with contextlib.suppress(InvalidStateError):  # interrupted before
            try:
                self._found.set_result(self._look())
            except (OSError, ValueError) as error:
                self._found.set_exception(error)

    def result(self, seconds: float) -> list[Any]:
        """Wait for the addresses of the host.

        Raises:
            OSError: the host is unknown.
            ValueError: the name cannot be that of a host.
            TimeoutError: the look-up took longer than ``seconds``.
            ConnectionAbortedError: ``interrupt`` was called.
        """
        try:
            return self._found.result(seconds)
        except CancelledError:
            raise ConnectionAbortedError(f"the look-up of {self._to[0]} was interrupted") from None
        except TimeoutError:
            raise TimeoutError(f"the name {self._to[0]} was not found within {seconds:.1f} s") from None

    def interrupt(self) -> None:
        """From any thread: who waits for the result waits no longer."""
        self._found.cancel()
