"""Our own address, as others reach it, those of others, and hosts as URLs write them."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any
from urllib.parse import urlsplit

from keepstep_mesh.security.tokens import is_loopback
from keepstep_mesh.threads.starting import Thread

SIOCGIFADDR = 0x8915
"""The request for the IPv4 address of an interface (netdevice(7)); Python does not export it."""


def in_url(host: str) -> str:
    """``host`` with the brackets that an IPv6 address needs before ``:port``."""
    return f"[{host}]" if ":" in host else host


def address_towards(peer: str) -> str:
    """Address of our interface that reaches ``peer``, a host or a URL; nothing is sent. OSError when none does.

    A host name would do only where every machine resolves every other's; this works wherever ``peer`` is reached.
    """
    host = _host_of(peer)
    for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.connect(target)
            except OSError:
                continue
            return str(probe.getsockname()[0])
    raise OSError(f"no route to {peer}: give a `hostname` that peers can reach")


def _host_of(peer: str) -> str:
    return (urlsplit(peer).hostname or "127.0.0.1") if "//" in peer else peer


def address_towards_any(peers: Iterable[str]) -> str:
    """Return the address at which those who use ``peers`` reach this machine.

    That is the address of our interface that reaches the first of ``peers`` that has one. The name of this machine may
    stand for loopback in its own hosts file, so loopback counts only if ``peers`` name it themselves. Otherwise, and
    while no peer is known, which may only be starting, it is ``outward_address``.
    """
    for peer in peers:
        with contextlib.suppress(OSError):
            found = address_towards(peer)
            if not is_loopback(found) or is_loopback(_host_of(peer)):
                return found
    return outward_address()


def reachable(url: str, peers: Iterable[str] = ()) -> str:
    """Return ``url`` of a server of ours, with our own address in the place of one that means all interfaces.

    Args:
        url: ``http://0.0.0.0:29510``.
        peers: URLs of servers whose users use this one too; see ``address_towards_any``.
    """
    host = urlsplit(url).hostname or ""
    if host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
        return url
    return url.replace(in_url(host), in_url(address_towards_any(peers)))


def outward_address() -> str:
    """Return the address of the interface with the default route, of IPv4 or else of IPv6. Sends nothing.

    Without a default route it is the IPv4 address of the first interface that has one, and loopback if none has.
    """
    for unused in ("192.0.2.1", "2001:db8::1"):  # of documentation: routed like any address
        with contextlib.suppress(OSError):
            return address_towards(unused)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                request = struct.pack("256s", interface.encode())
                own = socket.inet_ntoa(fcntl.ioctl(probe, SIOCGIFADDR, request)[20:24])
                if not is_loopback(own):
                    return own
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
