"""Conclusions of a worker from the messages of lighthouses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.session.session_machine import SessionCore, StaleLighthouseError
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol.membership import HeldAnswer, Member, MemberInfo
from keepstep_mesh.protocol.messages import PROTOCOL_VERSION, Quorum, QuorumRequest, Welcome

INFO = MemberInfo(address="http://me:1")
LISTED = (Member("r0:1", 7, 3, 0, False, INFO),)


def core_in_session(epoch: int = 2, quorum_id: int = 0) -> SessionCore:
    core = SessionCore("r0:1")
    core.hello()
    core.welcomed(welcome(epoch, quorum_id))
    return core


def welcome(epoch: int, quorum_id: int = 0) -> Welcome:
    return Welcome(PROTOCOL_VERSION, epoch, quorum_id, 100, 5000, 200)


def ask(core: SessionCore, step: int = 7, info: MemberInfo = INFO) -> int:
    return core.ask(request(step, info=info))


def request(step: int, **fields: Any) -> QuorumRequest:
    return replace(QuorumRequest(0, step, 3, False, 0, 1000, INFO), **fields)


def answer(request: int, epoch: int = 2, quorum_id: int = 5, *, members=LISTED, version: int = 1, step: int = 7):
    return Quorum(request, epoch, quorum_id, 0, version, step, 3, 0, members is None, members or ())


def test_an_answer_becomes_a_quorum_and_is_held_until_the_step_is_finished() -> None:
    core = core_in_session()
    quorum = core.answered(answer(ask(core)))
    assert quorum is not None
    assert (quorum.epoch, quorum.quorum_id, quorum.members, quorum.uniform) == (2, 5, LISTED, False)
    assert core.hello().held == HeldAnswer(2, 5, 7)
    core.finished_step()
    assert core.hello().held is None


def test_the_next_request_ends_the_hold_on_the_last_answer() -> None:
    core = core_in_session()
    core.answered(answer(ask(core)))
    ask(core)
    assert core.held is None


def test_an_answer_without_a_list_repeats_the_last_one_at_the_new_step() -> None:
    core = core_in_session()
    core.answered(answer(ask(core)))
    quorum = core.answered(answer(ask(core), members=None, step=8))
    assert quorum is not None
    assert quorum.uniform
    assert quorum.listed is LISTED
    assert [(member.step, member.lineage) for member in quorum.members] == [(8, 3)]


def test_a_list_of_another_connection_or_version_is_not_used() -> None:
    core = core_in_session()
    core.answered(answer(ask(core)))
    with pytest.raises(ProtocolError, match="member list 2, which was not sent"):
        core.answered(answer(ask(core), members=None, version=2))
    core.hello()
    with pytest.raises(ProtocolError, match="member list 1, which was not sent"):
        core.answered(answer(ask(core), members=None))


def test_a_late_answer_to_a_withdrawn_request_is_nobodys_but_its_list_counts() -> None:
    core = core_in_session()
    old = ask(core)
    assert core.withdraw(old)
    assert core.answered(answer(old)) is None
    assert core.held is None
    quorum = core.answered(answer(ask(core), members=None))
    assert quorum is not None
    assert quorum.listed is LISTED


def test_withdrawing_an_old_request_leaves_the_open_one_alone() -> None:
    core = core_in_session()
    old = ask(core)
    new = ask(core)
    assert new > old
    assert not core.withdraw(old)
    assert core.open is not None
    assert core.number == new


def test_a_lighthouse_of_a_lower_epoch_is_refused() -> None:
    core = core_in_session(epoch=4)
    core.hello()
    with pytest.raises(StaleLighthouseError, match="it is at epoch 3; this group has seen epoch 4"):
        core.welcomed(welcome(3))
    assert core.epoch == 4
    core.welcomed(welcome(4))
    core.welcomed(welcome(5))
    assert core.hello().epoch_seen == 5


def test_an_answer_of_a_lower_quorum_id_is_refused_and_the_hello_says_what_was_seen() -> None:
    core = core_in_session()
    core.answered(answer(ask(core), quorum_id=9))
    with pytest.raises(StaleLighthouseError, match="quorum 8; this group has seen quorum 9"):
        core.answered(answer(ask(core), quorum_id=8))
    assert core.hello().quorum_id_seen == 9


def test_a_welcome_may_know_less_of_quorums_because_the_hello_has_just_told_it() -> None:
    core = core_in_session(quorum_id=9)
    core.hello()
    core.welcomed(welcome(3, quorum_id=0))
    assert core.quorum_id == 9


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.integers(0, 4))))
def test_epoch_and_quorum_id_never_go_back(steps) -> None:
    core = SessionCore("r0:1")
    for greeting, epoch, quorum_id in steps:
        seen = core.epoch, core.quorum_id
        try:
            if greeting:
                core.hello()
                core.welcomed(welcome(epoch, quorum_id))
            else:
                core.answered(answer(ask(core), epoch, quorum_id))
        except StaleLighthouseError:
            assert (core.epoch, core.quorum_id) == seen
        assert core.epoch >= seen[0]
        assert core.quorum_id >= seen[1]


def test_the_info_travels_once_in_a_connection_and_again_when_it_changes() -> None:
    core = core_in_session()
    sent = []
    for info in (INFO, MemberInfo(address="http://me:1"), MemberInfo(address="http://me:2")):
        ask(core, info=info)
        sent.append(core.to_send(1000))
    assert [one.info is not None for one in sent] == [True, False, True]
    core.hello()
    again = core.to_send(400)
    assert again.info == MemberInfo(address="http://me:2")
    assert (again.request, again.timeout_ms) == (sent[-1].request, 400)


def test_an_info_that_cannot_travel_is_refused_before_anything_is_open() -> None:
    core = core_in_session()
    with pytest.raises(ProtocolError, match=r"info\.data too large: 70005 bytes"):
        ask(core, info=MemberInfo(data=b"x" * 70_000))
    assert core.open is None


def test_settings_travel_with_the_info_on_each_connection_and_again_when_they_change():
    core = SessionCore("a")
    core.hello()
    sent = []
    for settings in ("init_sync True", "init_sync True", "init_sync False"):
        core.ask(request(0, settings=settings))
        sent.append(core.to_send(1000))
    core.hello()
    sent.append(core.to_send(1000))
    assert [(one.settings, one.info is None) for one in sent] == [
        ("init_sync True", False),
        ("", True),
        ("init_sync False", False),
        ("init_sync False", False),
    ]


def test_a_round_without_healing_is_one_for_the_asker():
    core = SessionCore("a")
    core.hello()
    core.welcomed(Welcome(PROTOCOL_VERSION, 1, 0, 100, 5000, 200))
    core.ask(request(0, allow_heal=False))
    assert not core.to_send(1000).allow_heal
    told = Quorum(1, 1, 1, 0, 1, 0, "", 0, uniform=False, listed=(), allow_heal=False)
    assert not core.answered(told).allow_heal


def test_the_relays_of_durable_checkpoints_are_sent_when_they_change_and_on_a_new_connection() -> None:
    core, sent = core_in_session(), []
    for relays in ((), ("r1",), ("r1",), ("r2",)):
        core.ask(request(7, durable_relays=relays))
        sent.append(core.to_send(1000).durable_relays)
    assert sent == [(), ("r1",), (), ("r2",)]
    core.hello()
    assert core.to_send(1000).durable_relays == ("r2",)
