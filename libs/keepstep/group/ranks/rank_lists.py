"""Send the member list from rank 0 to the other ranks only when it has changed. Pure.

A list gets a number when the session returns another tuple. Rank 0 keeps for each connection the number of the list
that it sent last, and leaves out an unchanged list. The rank restores the same tuple object, so that its next plan
costs O(1) (``quorum_plan.make_plan``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import RankQuorum
from keepstep_mesh.protocol.membership import Member
from keepstep_mesh.protocol.messages import Quorum


class ListSender:
    """Rank 0's half, for all its connections. An answer with its list is encoded once."""

    def __init__(self) -> None:
        self._listed: tuple[Member, ...] = ()
        self._number = 0
        self._encoded: tuple[Quorum, int, Callable[[int], bytes]] | None = None
        """The last answer that was sent with its list: its quorum, its attempt, and a function from a request to its
        frame.
        """

    def frame(self, answer: RankQuorum, known: int) -> tuple[bytes, int]:
        """Return the frame for a connection on which list ``known`` was sent last (0: none), and the list's number."""
        quorum = answer.quorum
        if quorum.listed is not self._listed:
            self._listed, self._number = quorum.listed, self._number + 1
        if known == self._number:
            return codec.encode(replace(answer, quorum=replace(quorum, listed=()), list_number=known)), known
        if self._encoded is None or self._encoded[0] is not quorum or self._encoded[1] != answer.attempt:
            whole = replace(answer, list_number=self._number)
            self._encoded = quorum, answer.attempt, codec.answer_frames(whole)
        return self._encoded[2](answer.request), self._number


class ListKeeper:
    """A rank's half, for its connection."""

    def __init__(self) -> None:
        self._listed: tuple[Member, ...] = ()
        self._number = 0

    def restored(self, answer: RankQuorum) -> RankQuorum:
        """Return ``answer`` with its list. ProtocolError if it refers to a list that was not sent."""
        if answer.quorum.listed:
            self._listed, self._number = answer.quorum.listed, answer.list_number
            return answer
        if not self._listed or answer.list_number != self._number:
            raise ProtocolError(f"rank 0's answer refers to member list {answer.list_number}, expected {self._number}")
        return replace(answer, quorum=replace(answer.quorum, listed=self._listed))
