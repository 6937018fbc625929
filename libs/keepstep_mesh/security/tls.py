"""TLS of the mesh: which files, and the contexts that are made of them.

A service with a certificate speaks TLS only; with a CA too it is mutual: who connects must show a certificate of that
CA. A client trusts its CA file, else the CAs of the system, checks the name, and shows its certificate if it has one.
TLS 1.2 is the oldest that is spoken.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keepstep_mesh.config.settings import Settings
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.security.certificate_end import end_of
from keepstep_mesh.security.reloaded_files import ReloadedFiles

PEM_ADVICE = "docs/security.md has the openssl commands that make one"


class TlsError(KeepstepError):
    """A certificate or key cannot be used."""


@dataclass(frozen=True, slots=True)
class ServedTls:
    """The context of a service. ``ends_at``: when its certificate ends, in Unix seconds; None: unknown."""

    context: ssl.SSLContext
    ends_at: float | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. ``cert``: our certificate, then the intermediate ones; ``key``: its key, without a pass phrase.

    ``ca``: the CAs that the other side's certificate must come from.
    """

    cert: Path | None = None
    key: Path | None = None
    ca: Path | None = None

    def __bool__(self) -> bool:
        return bool(self.all())

    def all(self) -> tuple[Path, ...]:
        return tuple(one for one in (self.cert, self.key, self.ca) if one is not None)

    def server_context(self) -> ssl.SSLContext:
        """For a service. ``TlsError`` says which file is missing or wrong."""
        if self.cert is None:
            raise TlsError(f"TLS needs a certificate: give --tls-cert and --tls-key; {PEM_ADVICE}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._load(context)
        if self.ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def served(self) -> ServedTls:
        """See ``server_context``."""
        context = self.server_context()
        return ServedTls(context, end_of(self.cert.read_text(errors="replace")) if self.cert is not None else None)

    def client_context(self) -> ssl.SSLContext:
        """For a client. ``TlsError`` says which file is missing or wrong."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and names
        self._load(context)
        if self.ca is None:
            context.load_default_certs()
        return context

    def _load(self, context: ssl.SSLContext) -> None:
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if self.key is not None and self.cert is None:
            raise TlsError(f"the key {self.key} has no certificate: give --tls-cert too")
        if self.ca is not None:
            try:
                context.load_verify_locations(self.ca)
            except ssl.SSLError as error:
                raise TlsError(
                    f"{self.ca} holds no CA certificate in PEM ({reason_of(error)}); {PEM_ADVICE}"
                ) from error
            except OSError as error:
                raise TlsError(f"the CA file {self.ca} cannot be read: {error.strerror}") from error
        if self.cert is not None:
            _load_chain(context, self.cert, self.key or self.cert)


def _load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    def no_pass_phrase() -> str:
        raise TlsError(f"the key {key} wants a pass phrase; take it off with: openssl pkey -in {key} -out NEW")

    for file in (cert, key):
        try:
            file.open("rb").close()
        except OSError as error:
            raise TlsError(f"{file} cannot be read: {error.strerror}") from error
    try:
        context.load_cert_chain(cert, key, no_pass_phrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise TlsError(f"the key {key} is not that of the certificate {cert}") from error
        raise TlsError(
            f"{cert} and {key} are no certificate and key in PEM ({reason_of(error)}); {PEM_ADVICE}"
        ) from error


def reason_of(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).lower().replace("_", " ")


def tls_of_service(settings: Settings, service: str) -> TlsFiles:
    """Flags ``<service>_tls_cert``, ``_key`` and ``_ca``, else ``KEEPSTEP_<SERVICE>_TLS_CERT`` and so on."""
    return TlsFiles(*(settings.get(f"{service}_tls_{name}", Path, None) for name in ("cert", "key", "ca")))


def tls_of_client(flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> TlsFiles:
    """Flags ``tls_cert``, ``tls_key`` and ``tls_ca``, else ``KEEPSTEP_TLS_CERT`` and so on."""
    settings = Settings(flags or {}) if environ is None else Settings(flags or {}, environ)
    return TlsFiles(*(settings.get(f"tls_{name}", Path, None) for name in ("cert", "key", "ca")))


def watched_client_context(files: TlsFiles) -> ReloadedFiles[ssl.SSLContext] | None:
    """The context of a client, to be refreshed before a connection; None without files: the system's CAs."""
    return ReloadedFiles("certificates", files.all(), files.client_context) if files else None


def as_safe(address: str, asked: str) -> str:
    """Return ``address``, to which ``asked`` redirects: with https if ``asked`` uses it, because the token follows."""
    return address.replace("http://", "https://", 1) if asked.startswith("https://") else address


# ---- what a handshake that failed means
