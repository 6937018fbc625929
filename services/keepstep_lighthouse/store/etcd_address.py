"""Addresses of etcd stores: endpoints, prefix, TLS files, user."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from keepstep_lighthouse.store.contract import StoreError
from keepstep_mesh.config.logging import hide
from keepstep_mesh.net.addresses import in_url

DEFAULT_PORT = 2379
DEFAULT_PREFIX = "keepstep"


@dataclass(frozen=True, repr=False)
class EtcdAddress:
    """``etcd://host:port[,host:port]/prefix?ca=FILE&cert=FILE&key=FILE&user=NAME``; the password is not part of it."""

    endpoints: tuple[tuple[str, int], ...]
    prefix: str
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    user: str | None = None
    password: str | None = None

    @classmethod
    def parse(cls, url: str, environ: Mapping[str, str] = os.environ) -> EtcdAddress:
        """Parse ``url``. Raise ``StoreError`` if it is invalid, or if a user has no password.

        The password of ``user`` is in ``KEEPSTEP_ETCD_PASSWORD``, or in the file ``KEEPSTEP_ETCD_PASSWORD_FILE``.
        """
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise StoreError(
                "a password in an address is seen by everybody on this machine: write ?user=NAME behind the prefix and "
                "put the password into KEEPSTEP_ETCD_PASSWORD or KEEPSTEP_ETCD_PASSWORD_FILE"
            )
        endpoints = tuple(_endpoint(url, one) for one in parts.netloc.split(","))
        given = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if unknown := sorted(set(given) - {"ca", "cert", "key", "user"}):
            raise StoreError(f"{url}: unknown {', '.join(unknown)}; an etcd address accepts ca, cert, key and user")
        if bool(given.get("cert")) != bool(given.get("key")) or (given.get("cert") and not given.get("ca")):
            raise StoreError(f"{url}: incomplete TLS files: expected ca alone, or ca, cert and key")
        password = None
        if given.get("user"):
            password = _password(environ)
            if not password:
                raise StoreError("an etcd user needs KEEPSTEP_ETCD_PASSWORD or KEEPSTEP_ETCD_PASSWORD_FILE")
            hide(password)
        return cls(endpoints, parts.path.strip("/") or DEFAULT_PREFIX, **given, password=password)


def _endpoint(url: str, text: str) -> tuple[str, int]:
    try:
        one = urlsplit(f"//{text}")
        host, port = one.hostname, one.port or DEFAULT_PORT
    except ValueError as error:
        raise StoreError(f"{url}: invalid endpoint {text!r}: expected host:port ({error})") from None
    if not host:
        raise StoreError(f"{url}: expected etcd://host:port[,host:port]/prefix")
    return in_url(host), port


def _password(environ: Mapping[str, str]) -> str | None:
    if file := environ.get("KEEPSTEP_ETCD_PASSWORD_FILE"):
        try:
            return Path(file).read_text().strip()
        except OSError as error:
            raise StoreError(f"cannot read KEEPSTEP_ETCD_PASSWORD_FILE: {error}") from error
    return environ.get("KEEPSTEP_ETCD_PASSWORD")
