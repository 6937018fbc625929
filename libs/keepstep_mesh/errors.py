"""The errors of the mesh. Each says what happened, to what, and what to do next."""

from __future__ import annotations

from typing import ClassVar


class KeepstepError(RuntimeError):
    """Base class of keepstep's errors, except ``TimeoutError`` and errors of arguments."""


class ProtocolError(KeepstepError):
    """A peer sent a message that the protocol does not allow."""


class VersionError(ProtocolError):
    """A peer speaks an unsupported version of the protocol."""


class ManifestError(ProtocolError):
    """A manifest is damaged, hostile, or of a version that this build does not read. Nothing was allocated for it."""


class ContradictingRanks(ManifestError):
    """The manifests of two ranks of a checkpoint contradict each other, or no rank has a part of a tensor."""


class AuthError(KeepstepError):
    """A token is missing or wrong."""


class ForkError(KeepstepError):
    """A forked child used an object of its parent, such as the Manager."""


class SessionClosed(KeepstepError):
    """The session with the lighthouse has ended for good: evicted, refused, or closed by this process."""


class Banned(SessionClosed):
    """The lighthouse refuses the group: its name is banned, or this incarnation was evicted."""


class LayoutMismatch(KeepstepError):
    """The parameters of this group, or settings that decide its arithmetic, do not fit those of the job.

    ``peer_address``: the group server of a group that has the job's parameters; empty: the reason names the difference.
    ``peer_step``: the step that this group takes.
    """

    def __init__(self, reason: str, peer_address: str = "", peer_step: int = 0) -> None:
        super().__init__(reason)
        self.peer_address, self.peer_step = peer_address, peer_step


class MachineDiffers(LayoutMismatch):
    """The machine of this group computes another matrix product than equal machines of the job."""


class StartRefused(KeepstepError):
    """The job has finished, or may not go back to the step of this group."""


class JobClosed(StartRefused):
    """The groups of the job have finished together.

    ``step``, ``lineage``: their final state; ``groups``: their number; ``closed_ms``: Unix time of the end;
    ``finished``: whether this group holds that state.
    """

    def __init__(
        self, reason: str, step: int, lineage: int | str, groups: int, closed_ms: int, *, finished: bool
    ) -> None:
        super().__init__(reason)
        self.step, self.lineage, self.groups, self.closed_ms = step, lineage, groups, closed_ms
        self.finished = finished


class ReplicasDiverged(KeepstepError):
    """The weights of this group differ from those of other groups, and a heal does not repair that."""


class CollectivesMismatch(KeepstepError):
    """This group and another one began different numbers of collectives in one step."""


class ExitWithReason(SystemExit):
    """Ends the process with the exit code of the class. Its text is the reason."""

    exit_code: ClassVar[int]

    def __init__(self, reason: str) -> None:
        super().__init__(self.exit_code)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class Drained(ExitWithReason):
    """The group left the job on purpose at a step boundary. Exit code 0."""

    exit_code = 0
