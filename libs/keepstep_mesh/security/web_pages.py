"""Refuse requests of web pages to a server without tokens.

Such a server listens on loopback, where every browser of this machine can reach it. The request of a foreign page has
its ``Origin``. A page whose host name resolves to 127.0.0.1 (DNS rebinding) has the same origin for its browser, but
its name is in ``Host``. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from keepstep_mesh.errors import AuthError
from keepstep_mesh.security.tokens import is_loopback

_ORIGIN = re.compile(r"[a-z]+://(.+)")
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^][:/@\s]+))(?::[0-9]*)?")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})|\[[0-9A-Fa-f:.]+\]")

HOST_ADVICE = "give the name as `hostname`"
"""For the servers of trainers."""


class MisdirectedError(AuthError):
    """The request is for another host than this server stands for (HTTP status 421)."""


def host_problem(host: str | None, allowed: Collection[str], advice: str = "allow it with --allow-host") -> str | None:
    """Why a request with this ``Host`` is refused, as a sentence; None if it is not.

    ``allowed``: names beyond those of loopback; ``advice``: how to add one. Every browser sends a ``Host``: a request
    without one comes from no page.
    """
    if not host or _is_here(host, allowed):
        return None
    return (
        f"refusing a request to host {host[:80]!r}: without tokens only localhost and addresses of loopback are "
        f"answered, so that no web page gets in by DNS rebinding. Use localhost, or {advice}, or set tokens"
    )


def origin_problem(origin: str | None, allowed: Collection[str]) -> str | None:
    """Why a request of a page of this ``Origin`` is refused, as a sentence; None if it is not."""
    if not origin:
        return None
    matched = _ORIGIN.fullmatch(origin)
    if matched is not None and _is_here(matched[1], allowed):
        return None
    return f"a page of {origin[:80]} may not ask this service while it has no tokens"


def _is_here(authority: str, allowed: Collection[str]) -> bool:
    """Return whether ``host`` or ``host:port`` means this machine."""
    matched = _HOST.fullmatch(authority)
    if matched is None:
        return False
    host = (matched[1] or matched[2]).lower().removesuffix(".")
    return is_loopback(host) or host in {name.lower() for name in allowed}


def host_names(text: str) -> tuple[str, ...]:
    """Names as ``host_problem`` takes them, out of a text with commas between them. ``ValueError`` for what is none."""
    names = [name.strip() for name in text.split(",")] if text.strip() else []
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"allow_host: invalid host name {name!r}: expected names without scheme and port, comma separated"
            )
    return tuple(name.lower().strip("[]").removesuffix(".") for name in names)
