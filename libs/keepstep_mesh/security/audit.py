"""Who asked for what: every order is logged with its outcome, every refusal too, but no flood of them."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_mesh.security.tokens import Role


@dataclass(frozen=True, slots=True)
class Caller:
    """Who is at the other end. ``role`` and ``name`` are its token's, None and empty when it has no good one.

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
