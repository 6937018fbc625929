"""Events of a session, and the errors that answers of the lighthouse become. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from keepstep_mesh.errors import (
    AuthError,
    Banned,
    CollectivesMismatch,
    JobClosed,
    KeepstepError,
    LayoutMismatch,
    MachineDiffers,
    ProtocolError,
    ReplicasDiverged,
    SessionClosed,
    StartRefused,
    VersionError,
)
from keepstep_mesh.net.websocket import UpgradeError
from keepstep_mesh.protocol.group_messages import RankDenied
from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.messages import Closed, Denied, Drain, Evicted, MemberLost, Refused, RoundBroken, Services
from keepstep_mesh.protocol.stack_messages import Hung, StacksRequest


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


Push = MemberLost | RoundBroken | Drain | Evicted | Hung | StacksRequest | Services | Disconnected | Connected


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


DENIALS: Mapping[str, type[Exception]] = {
    "deadline": TimeoutError,
    "machine": MachineDiffers,
    "layout": LayoutMismatch,
    "start": StartRefused,
    "collectives": CollectivesMismatch,
    "diverged": ReplicasDiverged,
}
"""Code of a denied request: the error that it stands for."""


def of_closed(closed: Closed) -> JobClosed:
    """Return the end of a final request: the job is closed, and this group holds its state."""
    return of_final(f"the job is closed at step {closed.state.step}", closed.state, finished=True)


def of_final(reason: str, final: FinalState, *, finished: bool) -> JobClosed:
    """Return the error of a request for a step of a closed job. ``finished``: this group holds the final state."""
    return JobClosed(reason, final.step, final.lineage, final.groups, final.closed_ms, finished=finished)


def of_kind(kind: type[Exception], denied: Denied | RankDenied) -> Exception:
    """Return the error of a denied request."""
    if kind is LayoutMismatch:
        return LayoutMismatch(denied.reason, denied.peer_address, denied.peer_step)
    return kind(denied.reason)


def of_request(denied: Denied) -> Exception:
    """Return the error of a request that the lighthouse denied."""
    if denied.closed is not None:
        return of_final(denied.reason, denied.closed, finished=False)
    if (kind := DENIALS.get(denied.code)) is not None:
        return of_kind(kind, denied)
    return KeepstepError(f"the quorum request was denied ({denied.code}): {denied.reason}")
