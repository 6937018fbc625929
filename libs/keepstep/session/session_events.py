"""Events of a session, and the errors that answers of the lighthouse become. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from keepstep_mesh.errors import (
    AuthError,
    Banned,
    CollectivesMismatch,
    JobClosed,
    KeepstepError,
    LayoutMismatch,
    ProtocolError,
    ReplicasDiverged,
    SessionClosed,
    StartRefused,
    VersionError,
)
from keepstep_mesh.net.websocket import UpgradeError
from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.messages import Closed, Denied, Drain, Evicted, MemberLost, Refused, RoundBroken, Services


@dataclass(frozen=True, slots=True)
class Connected:
    """The session was opened; an open request was sent again."""

    lighthouse: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session was lost; the worker reconnects."""

    lighthouse: str
    reason: str


Push = MemberLost | RoundBroken | Drain | Evicted | Services | Disconnected | Connected


def of_connecting(error: Exception, problem: str) -> KeepstepError | None:
    """Return the error that ends the attempts to connect; None: retry. ``problem``: text of the error."""
    if not isinstance(error, UpgradeError):
        return None
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return AuthError(f"{problem}. Is KEEPSTEP_TOKEN the token of that lighthouse?")
    if error.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.MISDIRECTED_REQUEST) and error.said:
        return ProtocolError(problem)  # a retry would fail as well
    return None


def of_session(refused: Refused) -> KeepstepError | None:
    """Return the error of a refused session; None: try another lighthouse."""
    if refused.code == "not_ready":
        return None
    if refused.code.startswith("version_"):
        return VersionError(refused.reason)
    if refused.code == "banned":
        return Banned(refused.reason)
    return SessionClosed(f"refused ({refused.code}): {refused.reason}")


def of_closed(closed: Closed) -> JobClosed:
    """Return the end of a final request: the job is closed, and this group holds its state."""
    return _of_final(f"the job is closed at step {closed.state.step}", closed.state, finished=True)


def _of_final(reason: str, final: FinalState, *, finished: bool) -> JobClosed:
    return JobClosed(reason, final.step, final.lineage, final.groups, final.closed_ms, finished=finished)


def of_request(denied: Denied) -> Exception:
    if denied.code == "deadline":
        return TimeoutError(denied.reason)
    if denied.code == "layout":
        return LayoutMismatch(denied.reason, denied.peer_address, denied.peer_step)
    if (final := denied.closed) is not None:
        return _of_final(denied.reason, final, finished=False)
    if denied.code == "start":
        return StartRefused(denied.reason)
    if denied.code == "collectives":
        return CollectivesMismatch(denied.reason)
    if denied.code == "diverged":
        return ReplicasDiverged(denied.reason)
    return KeepstepError(f"the quorum request was denied ({denied.code}): {denied.reason}")
