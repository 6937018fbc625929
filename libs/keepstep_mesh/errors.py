"""The errors of the mesh. Each says what happened, to what, and what to do next."""

from __future__ import annotations

from typing import ClassVar


class KeepstepError(RuntimeError):
    """Root of all errors that keepstep raises on purpose, bar ``TimeoutError`` and errors of arguments."""


class ProtocolError(KeepstepError):
    """A peer sent what the protocol does not allow."""


class VersionError(ProtocolError):
    """A peer is too old or too new to talk to."""


class ManifestError(ProtocolError):
    """A manifest is damaged, hostile, or of a version that this build does not read. Nothing was allocated for it."""


class AuthError(KeepstepError):
    """A token is missing or wrong."""


class ForkError(KeepstepError):
    """The object belongs to the process that made it; this is a forked child of that, which cannot use it."""


class SessionClosed(KeepstepError):
    """The lighthouse session was ended for good (evicted, refused, or closed by us)."""


class Banned(SessionClosed):
    """The lighthouse does not let the group in: its name is banned, or this incarnation was evicted."""


class LayoutMismatch(KeepstepError):
    """The parameters of this group, or settings that decide its arithmetic, do not fit those of the job.

    ``peer_address``: the group server of a group that has the job's parameters; empty: the reason names the difference.
    """

    def __init__(self, reason: str, peer_address: str = "") -> None:
        super().__init__(reason)
        self.peer_address = peer_address


class ExitWithReason(SystemExit):
    """The process is to end, with the exit code of the class; its text says why."""

    exit_code: ClassVar[int]

    def __init__(self, reason: str) -> None:
        super().__init__(self.exit_code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Drained(ExitWithReason):
    """The group left the job on purpose at a step boundary. Exit code 0."""

    exit_code = 0
