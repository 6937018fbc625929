"""Certificates for tests of TLS, valid and invalid, created for each test."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import trustme

from keepstep_mesh.security.tls import TlsFiles

DAY = timedelta(days=1)


class Authority:
    """A CA whose files are in ``folder``. Each certificate has its key in the same file."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self._ca = trustme.CA(organization_name=name)
        self._folder = folder
        self._number = 0
        self.name = name
        self.pem = folder / f"{name}.pem"
        self._ca.cert_pem.write_to_path(self.pem)

    def certificate(self, *names: str, common_name: str | None = None, days: tuple[float, float] = (-1, 1)) -> Path:
        """Issue a certificate for ``names``. ``days``: start and end of its validity, in days from now."""
        now = datetime.now(UTC)
        issued = self._ca.issue_cert(
            *names, common_name=common_name, not_before=now + days[0] * DAY, not_after=now + days[1] * DAY
        )
        self._number += 1
        path = self._folder / f"{self.name}-{self._number}.pem"
        issued.private_key_and_cert_chain_pem.write_to_path(path)
        path.chmod(0o600)
        return path

    def self_signed(self) -> Path:
        """The CA's own certificate with its key."""
        path = self._folder / f"{self.name}-itself.pem"
        self._ca.private_key_pem.write_to_path(path)
        self._ca.cert_pem.write_to_path(path, append=True)
        return path

    def service(self, *, mutual: bool = False) -> TlsFiles:
        """Files of a service on loopback."""
        cert = self.certificate("localhost", "127.0.0.1", common_name="service")
        return TlsFiles(cert, ca=self.pem if mutual else None)

    def client(self, name: str = "client") -> TlsFiles:
        """Files of a client with a certificate."""
        return TlsFiles(self.certificate(f"{name}.example", common_name=name), ca=self.pem)

    def trusted(self) -> TlsFiles:
        """Files of a client without a certificate."""
        return TlsFiles(ca=self.pem)
