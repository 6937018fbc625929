"""The member list between rank 0 and the other ranks: sent when it changed, and right after whatever was sent."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.group.ranks.rank_lists import ListKeeper, ListSender
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import RankHello, RankQuorum
from keepstep_mesh.protocol.membership import Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum

INFO = MemberInfo("http://host:1", "http://host:1")


def members(count: int, step: int = 0) -> tuple[Member, ...]:
    return tuple(Member(f"g{number:04}:1", step, 0, 0, shrink_only=False, info=INFO) for number in range(count))


def answer(request: int, listed: tuple[Member, ...], *, attempt: int = 1, step: int = 0) -> RankQuorum:
    return RankQuorum(request, attempt, Quorum(0, 1, 7, 0, 0, step, 6, 0, uniform=True, listed=listed))


@dataclass
class Connection:
    """Both ends of one."""

    sent: int = 0
    keeper: ListKeeper = field(default_factory=ListKeeper)
    bytes: int = 0

    def carry(self, sender: ListSender, message: RankQuorum) -> RankQuorum:
        frame, self.sent = sender.frame(message, self.sent)
        self.bytes = len(frame)
        decoded = codec.decode(frame)
        assert isinstance(decoded, RankQuorum)
        return self.keeper.restored(decoded)


def test_a_list_that_has_not_changed_is_left_out_and_put_back_as_the_very_same_object() -> None:
    sender, connection, listed = ListSender(), Connection(), members(500)
    first = connection.carry(sender, answer(1, listed))
    assert (first.quorum, connection.bytes > 10_000) == (answer(1, listed).quorum, True)
    for request in (2, 3):
        later = connection.carry(sender, answer(request, listed, attempt=request, step=request))
        assert later.quorum.listed is first.quorum.listed
        assert (later.request, later.attempt, later.quorum.step) == (request, request, request)
        assert connection.bytes < 100


def test_a_changed_list_is_sent_once_on_every_connection() -> None:
    sender, connections = ListSender(), [Connection() for _ in range(3)]
    for listed in (members(50), members(51), members(51, step=9)):
        for request in (1, 2):
            for connection in connections:
                assert connection.carry(sender, answer(request, listed)).quorum.listed == listed
                assert (connection.bytes > 1000) == (request == 1)


def test_a_new_connection_gets_the_list_that_others_have() -> None:
    sender, old, listed = ListSender(), Connection(), members(50)
    old.carry(sender, answer(1, listed))
    old.carry(sender, answer(2, listed))
    new = Connection()
    assert new.carry(sender, answer(3, listed)).quorum.listed == listed
    assert new.carry(sender, answer(4, listed)).quorum.listed == listed
    assert new.bytes < 100


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=30))
def test_every_connection_has_the_right_list_whatever_was_sent_before(
    steps: list[tuple[int, int, bool]],
) -> None:
    """Lists come and go, some connections miss some answers, and some are made again."""
    lists = [members(2), members(3), members(2, step=5)]
    sender, connections = ListSender(), [Connection() for _ in range(3)]
    for request, (number, which, anew) in enumerate(steps):
        if anew:
            connections[which] = Connection()
        got = connections[which].carry(sender, answer(request, lists[number], attempt=request // 3))
        assert got.quorum == answer(request, lists[number]).quorum
        assert (got.request, got.attempt) == (request, request // 3)


def test_an_answer_that_refers_to_a_list_that_was_not_sent_is_a_protocol_error() -> None:
    sender, listed = ListSender(), members(2)
    keeper = ListKeeper()
    _, known = sender.frame(answer(1, listed), 0)  # which never came
    frame, _ = sender.frame(answer(2, listed), known)
    with pytest.raises(ProtocolError, match="refers to member list 1, expected 0"):
        keeper.restored(codec.decode(frame))
    keeper.restored(answer(1, listed))
    with pytest.raises(ProtocolError, match="refers to member list 1, expected 0"):
        keeper.restored(codec.decode(frame))


def test_an_older_rank_0_sends_every_list_and_is_understood() -> None:
    keeper = ListKeeper()
    for listed in (members(2), members(3), members(3)):
        fields = msgpack.unpackb(codec.encode(answer(1, listed)))[:-1]  # without list_number
        assert keeper.restored(codec.decode(msgpack.packb(fields))).quorum.listed == listed


def test_an_older_rank_does_not_say_that_it_keeps_lists() -> None:
    hello = RankHello(1, 1, 1, 2, 0, keeps_list=True)
    older = codec.decode(msgpack.packb(msgpack.unpackb(codec.encode(hello))[:6]))
    assert older == RankHello(1, 1, 1, 2, 0)
    assert not older.keeps_list
