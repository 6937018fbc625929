"""Settings of every service: address, tokens, certificates."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

from keepstep_mesh.config.settings import Settings, base_url, bind_address, boolean, split_addresses
from keepstep_mesh.security.reloaded_files import ReloadedFiles
from keepstep_mesh.security.tls import TlsFiles, tls_of_client, tls_of_service
from keepstep_mesh.security.tokens import ClientToken, Tokens, watched_tokens
from keepstep_mesh.security.web_pages import host_names


@dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """``bind``: host:port; port 0: any free one. ``tls``: files of its certificate; without them plain HTTP.

    ``insecure``: listen beyond this machine without a token. ``advertise``: its address for others; None: the address
    on which it listens. ``peer_tls``: certificates for its connections to lighthouses. ``allow_host``: host names
    beside localhost that are accepted on loopback without a token.
    """

    bind: str = "127.0.0.1:0"
    tokens: Tokens | ReloadedFiles[Tokens] = field(default_factory=Tokens)
    tls: TlsFiles = field(default_factory=TlsFiles)
    insecure: bool = False
    advertise: str | None = None
    peer_tls: TlsFiles = field(default_factory=TlsFiles)
    allow_host: tuple[str, ...] = ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Host names that are accepted on loopback, beside localhost."""
        advertised = urlsplit(self.advertise or "").hostname
        return self.allow_host + ((advertised,) if advertised else ())

    @property
    def beside(self) -> tuple[str, ...]:
        """URLs of services whose users use this one too."""
        return ()

    def own_token(self) -> str | None:
        """Return the token that it sends to other services, one of those it accepts."""
        return (self.tokens.value if isinstance(self.tokens, ReloadedFiles) else self.tokens).for_services()


@dataclass(frozen=True, kw_only=True)
class RegisteredSettings(ListenSettings):
    """Settings of a service that registers with ``lighthouses`` as ``name``, with ``token``."""

    service: ClassVar[str]
    lighthouses: tuple[str, ...] = ()
    name: str | None = None
    token: ClientToken | None = None

    @property
    def beside(self) -> tuple[str, ...]:
        return self.lighthouses

    def shown_token(self) -> str | None:
        """Return the token that it sends to lighthouses: ``token``, else one of those it accepts."""
        return self.token.latest() if self.token else self.own_token()

    def service_name(self, port: int) -> str:
        """Return ``name``, else a name that is stable over restarts."""
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("-._") or self.service
        return self.name or f"{host}-{port}"


def settings_of_service(service: str, flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Name ``flags`` as the variables are, ``<service>_<name>``; only ``lighthouse`` has one name for all services."""
    given = {name if name == "lighthouse" else f"{service}_{name}": value for name, value in flags.items()}
    return Settings(flags=given, environ=environ)


def read_registered_settings(settings: Settings, service: str, bind: str) -> dict[str, Any]:
    """The fields of ``RegisteredSettings``; see ``read_listen_settings``."""
    lighthouses = settings.get("lighthouse", str, "")
    return {
        **read_listen_settings(settings, service, bind),
        "lighthouses": split_addresses(lighthouses) if lighthouses else (),
        "name": settings.get(f"{service}_name", str, None),
        "token": ClientToken(settings.environ),
    }


def read_listen_settings(settings: Settings, service: str, bind: str) -> dict[str, Any]:
    """The fields of ``ListenSettings``; those of files from ``<service>_token_file``, ``_tls_cert``, ``_key``, ``_ca``.

    ``bind``: unless said otherwise. Raises ``ValueError`` that names what is wrong, ``AuthError`` for tokens.
    """
    bind = settings.get(f"{service}_bind", str, bind)
    try:
        bind_address(bind)
    except ValueError as error:
        raise ValueError(f"bind {bind!r}: {error}") from error
    tls = tls_of_service(settings, service)
    advertise = settings.get(f"{service}_advertise", str, None)
    if advertise is not None:
        advertise = base_url(advertise if "://" in advertise else f"{'https' if tls else 'http'}://{advertise}")
    return {
        "bind": bind,
        "tokens": watched_tokens(settings.environ, settings.path(f"{service}_token_file")),
        "tls": tls,
        "insecure": settings.get(f"{service}_insecure", boolean, default=False),
        "advertise": advertise,
        "allow_host": host_names(settings.get(f"{service}_allow_host", str, "")),
        "peer_tls": tls_of_client(environ=settings.environ) or tls,
    }
