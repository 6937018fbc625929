"""Bearer tokens by role, and who may do what.

A service has up to one token per role; a client presents one. Without any token a service listens on loopback only and
everybody there may do everything. Tokens are compared in constant time and hidden from logs.
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from keepstep_mesh.errors import AuthError
from keepstep_mesh.logging import hide

MIN_TOKEN_CHARACTERS = 16


class Role(enum.Enum):
    """Who a token speaks for."""

    WORKER = "worker"
    SERVICE = "service"
    ADMIN = "admin"


class Access(enum.Enum):
    """What a route asks for: the roles that may use it. ``OPEN`` needs no token."""

    OPEN = None
    READ = frozenset(Role)
    WORKER = frozenset((Role.WORKER, Role.ADMIN))
    SERVICE = frozenset((Role.SERVICE, Role.ADMIN))
    ADMIN = frozenset((Role.ADMIN,))


class ForbiddenError(AuthError):
    """The token is known, but its role may not do this."""


@dataclass(frozen=True, repr=False)
class Tokens:
    """The tokens that a service takes, one per role; None: that role is not given out."""

    worker: str | None = None
    service: str | None = None
    admin: str | None = None

    def __post_init__(self) -> None:
        for one in fields(self):
            token = getattr(self, one.name)
            if token is None:
                continue
            hide(token)
            if len(token) < MIN_TOKEN_CHARACTERS or not token.isascii() or not token.isprintable() or " " in token:
                raise AuthError(
                    f"the {one.name} token must have at least {MIN_TOKEN_CHARACTERS} printable characters, no blank; "
                    'make one with: python -c "import secrets; print(secrets.token_urlsafe())"'
                )
        given = [token for token in (self.worker, self.service, self.admin) if token is not None]
        if len(set(given)) < len(given):
            raise AuthError("two roles have the same token; then a worker could do what only an admin may")

    def __bool__(self) -> bool:
        return any((self.worker, self.service, self.admin))

    def __repr__(self) -> str:
        roles = [one.name for one in fields(self) if getattr(self, one.name)]
        return f"Tokens({', '.join(roles) or 'none'})"

    def role(self, authorization: str | None) -> Role:
        """Whose token the ``Authorization`` header holds. ``AuthError`` says what is wrong with it."""
        if not self:
            return Role.ADMIN
        scheme, _, given = (authorization or "").partition(" ")
        if not given or scheme.lower() != "bearer":
            raise AuthError("a token is needed: send Authorization: Bearer <token> (set KEEPSTEP_TOKEN)")
        found = None
        for role in Role:
            token = getattr(self, role.value)
            if token is not None and hmac.compare_digest(token.encode(), given.encode(errors="replace")):
                found = role
        if found is None:
            raise AuthError("the token is wrong; compare KEEPSTEP_TOKEN with the tokens of this service")
        return found

    def check(self, authorization: str | None, access: Access) -> Role | None:
        """The role that asks; None for an open route. ``AuthError``, or ``ForbiddenError`` for a role that may not."""
        roles = access.value
        if roles is None:
            return None
        role = self.role(authorization)
        if role not in roles:
            wanted = " or ".join(sorted(one.value for one in roles))
            missing = (
                "" if getattr(self, Role.ADMIN.value) else "; this service has no admin token (KEEPSTEP_ADMIN_TOKEN)"
            )
            raise ForbiddenError(f"a {role.value} token may not do this; it takes {wanted}{missing}")
        return role


def tokens_of_service(environ: Mapping[str, str] = os.environ, token_file: Path | None = None) -> Tokens:
    """From ``KEEPSTEP_{WORKER,SERVICE,ADMIN}_TOKEN``; what is not there, from ``token_file``.

    The file has lines ``role = token``; empty lines and those that start with ``#`` are skipped. ``AuthError`` when it
    cannot be read or understood.
    """
    found: dict[str, str] = {}
    if token_file is not None:
        try:
            lines = token_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthError(f"token file {token_file}: {error}") from error
        for number, line in enumerate(map(str.strip, lines), 1):
            if not line or line.startswith("#"):
                continue
            name, equals, token = (part.strip() for part in line.partition("="))
            if not equals or name not in {role.value for role in Role} or not token:
                raise AuthError(f"token file {token_file}, line {number}: write worker = <token>, service = or admin =")
            found[name] = token
    for role in Role:
        if from_variable := environ.get(f"KEEPSTEP_{role.name}_TOKEN"):
            found[role.value] = from_variable
    return Tokens(**found)


def token_of_client(environ: Mapping[str, str] = os.environ) -> str | None:
    """``KEEPSTEP_TOKEN``, else the only line of the file ``KEEPSTEP_TOKEN_FILE``; None when neither is set."""
    token = environ.get("KEEPSTEP_TOKEN") or None
    path = environ.get("KEEPSTEP_TOKEN_FILE")
    if token is None and path:
        try:
            token = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise AuthError(f"KEEPSTEP_TOKEN_FILE={path}: {error}") from error
    if token:
        hide(token)
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, tokens: Tokens, *, insecure: bool) -> None:
    """Raises ``AuthError`` for a service that would let everybody in from beyond this machine."""
    if not tokens and not insecure and not is_loopback(host):
        raise AuthError(
            f"refusing to listen on {host} without a token: whoever reaches the port could end the job. Set "
            "KEEPSTEP_WORKER_TOKEN and KEEPSTEP_ADMIN_TOKEN (or --token-file), listen on 127.0.0.1, or say --insecure"
        )
