"""When the certificates of a PEM file end. Pure.

Python has no public function that parses a certificate that no peer has shown, so this reads the one field in DER
(https://www.rfc-editor.org/rfc/rfc5280#section-4.1).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime

BLOCK = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
VERSION, UTC_TIME = 0xA0, 0x17
"""Tags of DER: the optional version of a certificate, and a time with a year of two digits."""


def end_of(pem: str) -> float | None:
    """Return the Unix time at which the first certificate of ``pem`` ends; None: it has none that can be read."""
    return min(map(_end, BLOCK.findall(pem)), default=None)


def _end(block: str) -> float:
    certificate = next(_values(ssl.PEM_cert_to_DER_cert(block)))[1]
    fields = _values(next(_values(certificate))[1])
    after_version = [value for tag, value in fields if tag != VERSION]
    validity = after_version[3]  # serial number, signature, issuer, validity
    _, (tag, text) = _values(validity)
    digits = text.decode("ascii")
    if tag == UTC_TIME:
        digits = ("19" if digits >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _values(der: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each value in ``der``."""
    at = 0
    while at < len(der):
        tag, length = der[at], der[at + 1]
        at += 2
        if length & 0x80:
            size = length & 0x7F
            length = int.from_bytes(der[at : at + size])
            at += size
        yield tag, der[at : at + length]
        at += length
