"""The client in lines of the audit log."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_mesh.security.tokens import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """A client. ``role`` and ``name`` are those of its token; None and empty without a valid token.

    ``certificate``: the common name (else the first alternative name) of its certificate, with mutual TLS.
    """

    remote: str
    role: Role | None = None
    name: str = ""
    certificate: str = ""

    def __str__(self) -> str:
        """``admin alice (certificate ops.example) at 10.0.0.7``."""
        words = [self.role.value if self.role else "nobody", self.name]
        words += [f"(certificate {self.certificate})" if self.certificate else "", "at", self.remote]
        return " ".join(word for word in words if word)
