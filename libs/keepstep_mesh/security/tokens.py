"""Bearer tokens with roles, and the access of each role.

A service has any number of tokens for each role; a client sends one. Without tokens a service listens on loopback only
and grants every access. Tokens are compared in constant time and hidden from logs. Files of tokens are reloaded when
they change.

Clients send the token itself to lighthouses, and to services whose address the user gave. To a service whose address
came from a lighthouse they send a token derived for this kind of service at this address, because every holder of a
service token can register an address. Processes of a job send each other a token derived for peers. A derived token is
valid nowhere else.
"""

from __future__ import annotations

import enum
import hmac
import ipaddress
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from urllib.parse import urlsplit

from keepstep_mesh.config.logging import hide
from keepstep_mesh.errors import AuthError
from keepstep_mesh.security.reloaded_files import ReloadedFiles

MIN_TOKEN_CHARACTERS = 16
TOKEN_CHECK_SECONDS = 1.0
"""Least interval at which a client checks its token file for changes."""


class Role(enum.Enum):
    """The role of a token."""

    WORKER = "worker"
    SERVICE = "service"
    ADMIN = "admin"


class Access(enum.Enum):
    """The roles that may use a route. ``OPEN`` needs no token."""

    OPEN = None
    READ = frozenset(Role)
    WORKER = frozenset((Role.WORKER, Role.ADMIN))
    SERVICE = frozenset((Role.SERVICE, Role.ADMIN))
    ADMIN = frozenset((Role.ADMIN,))


@dataclass(frozen=True, slots=True)
class Token:
    """``name``: whose it is, for the audit log; may be empty."""

    role: Role
    value: str = field(repr=False)
    name: str = ""


class ForbiddenError(AuthError):
    """The token is known, but its role may not do this. ``token``: that one."""

    def __init__(self, reason: str, token: Token | None = None) -> None:
        super().__init__(reason)
        self.token = token


@dataclass(frozen=True, repr=False, eq=False)
class Tokens:
    """The tokens that a service takes: one for each role, or ``named`` ones; a role without any is not given out."""

    worker: str | None = None
    service: str | None = None
    admin: str | None = None
    named: tuple[Token, ...] = ()

    def __post_init__(self) -> None:
        roles: dict[str, Role] = {}
        for token in self.all:
            text = token.value
            hide(text)
            if len(text) < MIN_TOKEN_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
                raise AuthError(
                    f"the {token.role.value} token must have at least {MIN_TOKEN_CHARACTERS} printable characters, no "
                    'blank; make one with: python -c "import secrets; print(secrets.token_urlsafe())"'
                )
            if roles.setdefault(text, token.role) is not token.role:
                raise AuthError("two roles have the same token; then a worker could do what only an admin may")

    @cached_property
    def all(self) -> tuple[Token, ...]:
        given = [Token(role, value) for role in Role if (value := getattr(self, role.value)) is not None]
        order = list(Role)
        return tuple(sorted((*given, *self.named), key=lambda one: order.index(one.role)))

    def __bool__(self) -> bool:
        return bool(self.all)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and self.all == other.all

    def __hash__(self) -> int:
        return hash(self.all)

    def __repr__(self) -> str:
        roles = dict.fromkeys(one.role.value for one in self.all)
        return f"Tokens({', '.join(roles) or 'none'})"

    def holder(self, authorization: str | None, places: Collection[str] = ()) -> Token:
        """The token that the ``Authorization`` header holds, or from which what it holds was derived for one of
        ``places`` (``place_of``). ``AuthError`` says what is wrong with it.

        Where no token is set everybody is an admin.
        """
        if not self:
            return Token(Role.ADMIN, "")
        scheme, _, given = (authorization or "").partition(" ")
        if not given or scheme.lower() != "bearer":
            raise AuthError("a token is needed: send Authorization: Bearer <token> (set KEEPSTEP_TOKEN)")
        found = None
        for token in self.all:  # all of them, so that the time tells nothing
            for known in (token.value, *(derived(token.value, place) for place in places)):
                if _equal(known, given):
                    found = token
        if found is None:
            also = f"; of derived ones it takes those for {', '.join(sorted(places))}" if places else ""
            raise AuthError(
                "the token is wrong; compare KEEPSTEP_TOKEN, or the file it is in, with the tokens of this service"
                + also
            )
        return found

    def for_services(self) -> str | None:
        """Return the token for other services with the same tokens: the first service token, else admin token."""
        found = {token.role: token.value for token in reversed(self.all)}
        return found.get(Role.SERVICE) or found.get(Role.ADMIN)

    def check(self, authorization: str | None, access: Access, places: Collection[str] = ()) -> Token | None:
        """Return the token of the client; None for an open route. Raises ``AuthError``, or ``ForbiddenError``.

        ``places``: see ``holder``.
        """
        roles = access.value
        if roles is None:
            return None
        token = self.holder(authorization, places)
        if token.role not in roles:
            wanted = " or ".join(sorted(one.value for one in roles))
            has_admin = any(one.role is Role.ADMIN for one in self.all)
            missing = "" if has_admin else "; this service has no admin token (KEEPSTEP_ADMIN_TOKEN)"
            raise ForbiddenError(f"a {token.role.value} token may not do this; it takes {wanted}{missing}", token)
        return token


def place_of(kind: str, address: str) -> str:
    """Return the place for which a token is derived: a service of this kind at ``address``, with http or https."""
    return f"{kind} {urlsplit(address).netloc.lower()}"


@lru_cache(maxsize=1024)
def derived(token: str, place: str) -> str:
    """Derive from ``token`` the one that is valid at ``place`` (``place_of``) only."""
    return hmac.digest(token.encode(), f"keepstep service {place}".encode(), "sha256").hex()


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(errors="replace"), other.encode(errors="replace"))


def tokens_of_service(environ: Mapping[str, str] = os.environ, token_file: Path | None = None) -> Tokens:
    """From ``KEEPSTEP_{WORKER,SERVICE,ADMIN}_TOKEN``; what is not there, from ``token_file``.

    The file has lines ``role = token`` or ``role name = token``, any number for each role; empty lines and those that
    start with ``#`` are skipped. ``AuthError`` when it cannot be read or understood, or holds no token.
    """
    found: dict[Role, list[Token]] = {}
    if token_file is not None:
        for number, line in enumerate(map(str.strip, _read(token_file, "token file ").splitlines()), 1):
            if line and not line.startswith("#"):
                token = _token_of_line(line, f"token file {token_file}, line {number}")
                found.setdefault(token.role, []).append(token)
        if not found:
            raise AuthError(f"token file {token_file} holds no token; write worker = <token>, admin = <token>")
    for role in Role:
        if from_variable := environ.get(f"KEEPSTEP_{role.name}_TOKEN"):
            found[role] = [Token(role, from_variable)]
    return Tokens(named=tuple(token for tokens in found.values() for token in tokens))


def watched_tokens(environ: Mapping[str, str] = os.environ, token_file: Path | None = None) -> ReloadedFiles[Tokens]:
    """The same, read again when the file changes."""
    files = () if token_file is None else (token_file,)
    return ReloadedFiles("tokens", files, partial(tokens_of_service, environ, token_file))


def _token_of_line(line: str, where: str) -> Token:
    left, _, value = (part.strip() for part in line.partition("="))
    word, _, name = (part.strip() for part in left.partition(" "))
    if word not in {role.value for role in Role} or not value or not name.isprintable():
        raise AuthError(
            f"{where}: write worker = <token>, service = <token> or admin = <token>; a name may stand behind the role"
        )
    return Token(Role(word), value, name)


def _read(file: Path, what: str) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthError(f"{what}{file}: {error}") from error


class ClientToken:
    """The token of a client for services, and the derived one for the other processes of its job.

    Read from ``KEEPSTEP_TOKEN``, else from the file ``KEEPSTEP_TOKEN_FILE``, which is reloaded when it changes. The
    first line of the file is sent; every line is accepted from peers, so that old and new tokens work during a
    rotation. Peers use plain HTTP, so they send a derived token, which does not reveal the token. Raises ``AuthError``
    if the file cannot be read. Safe to use from any thread.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        fixed, path = environ.get("KEEPSTEP_TOKEN"), environ.get("KEEPSTEP_TOKEN_FILE")
        file = Path(path) if path and not fixed else None
        self.source = f"the file {file}" if file else "KEEPSTEP_TOKEN" if fixed else ""
        """Source of the token, for messages; empty: no token."""
        files = () if file is None else (file,)
        self._tokens = ReloadedFiles("token", files, lambda: _client_tokens(fixed, file))
        self._looked = time.monotonic()

    @classmethod
    def of(cls, token: str | ClientToken | None) -> ClientToken:
        """``token`` itself, or one that never changes."""
        return token if isinstance(token, ClientToken) else cls({"KEEPSTEP_TOKEN": token} if token else {})

    @property
    def shown(self) -> str | None:
        """To services."""
        return next(iter(self._current()), None)

    def peer_headers(self) -> dict[str, str]:
        """Return the headers of a request to a peer."""
        shown = self.shown
        return {"Authorization": f"Bearer {_for_peers(shown)}"} if shown else {}

    def accepts_peer(self, authorization: str) -> bool:
        """Return whether a peer may connect with this header. Without a token every peer may."""
        tokens = self._current()
        return not tokens or any(_equal(f"Bearer {_for_peers(token)}", authorization) for token in tokens)

    def latest(self) -> str | None:
        """Return the current token for services, after a check of the file."""
        self.refresh()
        return self.shown

    def refresh(self) -> None:
        """Check now whether the file has changed."""
        self._looked = time.monotonic()
        self._tokens.refresh()

    def _current(self) -> tuple[str, ...]:
        if time.monotonic() - self._looked >= TOKEN_CHECK_SECONDS:
            self.refresh()
        return self._tokens.value

    def __bool__(self) -> bool:
        return bool(self._tokens.value)


def _client_tokens(fixed: str | None, file: Path | None) -> tuple[str, ...]:
    if file is None:
        found = [fixed] if fixed else []
    else:
        found = [line for line in map(str.strip, _read(file, "KEEPSTEP_TOKEN_FILE=").splitlines()) if line]
        if not found:
            raise AuthError(f"KEEPSTEP_TOKEN_FILE={file} is empty; it must hold the token")
    for token in found:
        if not token.isprintable():
            source = "KEEPSTEP_TOKEN" if file is None else f"KEEPSTEP_TOKEN_FILE={file}"
            raise AuthError(f"{source} holds more than one line, or another control character; it must be a word")
        hide(token)
        hide(_for_peers(token))
    return tuple(found)


def _for_peers(token: str) -> str:
    return hmac.digest(token.encode(), b"keepstep peers", "sha256").hex()


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach what listens on ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bind(host: str, tokens: Tokens, *, insecure: bool) -> None:
    """Raise ``AuthError`` for a service without tokens that would listen beyond this machine."""
    if not tokens and not insecure and not is_loopback(host):
        raise AuthError(
            f"refusing to listen on {host} without a token: any client that reaches the port could end the job. Set "
            "KEEPSTEP_WORKER_TOKEN and KEEPSTEP_ADMIN_TOKEN (or --token-file), listen on 127.0.0.1, or pass --insecure"
        )
