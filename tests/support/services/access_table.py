"""Check a running service against its table of routes and roles."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from keepstep_mesh.net.http import client_session
from keepstep_mesh.security.tokens import Role, Tokens

TOKENS = Tokens(worker="worker-" * 3, service="service-" * 3, admin="admin-" * 4)
"""Tokens of the service under test."""
ROLES = tuple(role.value for role in Role)
ASKERS = ("nobody", "stranger", *ROLES)


async def check_access(
    table: Mapping[tuple[str, str], str], asker: str, address: str, url_of: Callable[[str], str], shows: str = ""
) -> None:
    """Call every route as ``asker``. ``table``: (method, path) -> the allowed roles, or ``anybody``.

    ``url_of`` fills in a path. ``shows``: a text to send in place of the asker's token.
    """
    token = shows or {"nobody": None, "stranger": "stranger-" * 3}.get(asker) or getattr(TOKENS, asker, None)
    async with client_session(token) as http:
        for (method, path), roles in table.items():
            async with http.request(method, address + url_of(path)) as answer:  # of a stream the head is enough
                if roles == "anybody" or asker in roles.split():
                    assert answer.status not in (401, 403), (method, path, asker)
                else:
                    assert answer.status == (403 if asker in ROLES else 401), (method, path, asker)
                    assert method == "HEAD" or (await answer.json(content_type=None))["detail"]
