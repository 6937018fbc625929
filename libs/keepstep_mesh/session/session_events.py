"""What a session tells on its own account, and what an error of the lighthouse is for who asked. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from keepstep_mesh.errors import (
    AuthError,
    Banned,
    KeepstepError,
    LayoutMismatch,
    ProtocolError,
    SessionClosed,
    VersionError,
)
from keepstep_mesh.net.websocket import UpgradeError
from keepstep_mesh.protocol.messages import Denied, Drain, Evicted, MemberLost, Refused, RoundBroken, Services


@dataclass(frozen=True, slots=True)
class Connected:
    """Welcomed by a lighthouse; open requests have been sent again."""

    lighthouse: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The session broke; another one is being opened."""

    lighthouse: str
    reason: str


Push = MemberLost | RoundBroken | Drain | Evicted | Services | Disconnected | Connected


def of_connecting(error: Exception, problem: str) -> KeepstepError | None:
    """What ends the attempts to find a lighthouse; None: another attempt may succeed. ``problem``: in words."""
    if not isinstance(error, UpgradeError):
        return None
    if error.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return AuthError(f"{problem}. Is KEEPSTEP_TOKEN the token of that lighthouse?")
    if error.status in (HTTPStatus.BAD_REQUEST, HTTPStatus.MISDIRECTED_REQUEST) and error.said:
        return ProtocolError(problem)  # what is wrong with the job's name, or the lighthouse's, stays wrong
    return None


def of_session(refused: Refused) -> KeepstepError | None:
    """None: another lighthouse may take it."""
    if refused.code == "not_ready":
        return None
    if refused.code.startswith("version_"):
        return VersionError(refused.reason)
    if refused.code == "banned":
        return Banned(refused.reason)
    return SessionClosed(f"refused ({refused.code}): {refused.reason}")


def of_request(denied: Denied) -> Exception:
    if denied.code == "deadline":
        return TimeoutError(denied.reason)
    if denied.code == "layout":
        return LayoutMismatch(denied.reason, denied.peer_address)
    return KeepstepError(f"the quorum request was {denied.code}: {denied.reason}")
