"""Conclusions of a worker from the messages of lighthouses, and the lighthouse that it tries next."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol.membership import HeldAnswer, Member, MemberInfo
from keepstep_mesh.protocol.messages import PROTOCOL_VERSION, QuorumAnswer, QuorumRequest, Welcome
from keepstep_mesh.session.session_machine import (
    PASS_BACKOFF,
    SESSION_CONNECT_SECONDS,
    SETTLED_SECONDS,
    Addresses,
    SessionCore,
    StaleLighthouseError,
)

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
    return QuorumAnswer(request, epoch, quorum_id, 0, version, step, 3, 0, members)


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


# ---- which lighthouse next


def delays(addresses: Addresses, count: int, chance: float = 1.0) -> list[tuple[float, str]]:
    return [addresses.next(chance) for _ in range(count)]


def test_every_address_is_tried_once_without_waiting() -> None:
    assert delays(Addresses(["a", "b", "a"]), 2) == [(0.0, "a"), (0.0, "b")]


def test_each_further_pass_waits_longer_up_to_a_limit() -> None:
    addresses = Addresses(["a", "b"])
    waits = [delay for delay, _ in delays(addresses, 40) if delay]
    assert waits[:4] == [0.02, 0.04, 0.08, 0.16]
    assert waits[-1] == PASS_BACKOFF.most
    assert waits == sorted(waits)


def test_chance_spreads_the_waits() -> None:
    assert [delays(Addresses(["a"]), 2, chance)[1][0] for chance in (0.0, 0.5)] == [0.01, 0.015]


def test_a_connection_that_lasted_is_tried_again_at_once_and_first() -> None:
    addresses = Addresses(["a", "b"])
    delays(addresses, 9)
    addresses.lost("b", SETTLED_SECONDS)
    assert delays(addresses, 2) == [(0.0, "b"), (0.0, "a")]
    assert addresses.next(1.0) == (0.02, "a")


def test_a_lighthouse_that_fell_silent_is_tried_last() -> None:
    addresses = Addresses(["a", "b", "c"])
    addresses.next(1.0)
    addresses.lost("a", 60.0, silent=True)
    assert delays(addresses, 3) == [(0.0, "b"), (0.0, "c"), (0.0, "a")]


def test_a_lighthouse_that_fell_silent_is_waited_for_briefly_and_longer_each_time() -> None:
    addresses = Addresses(["a", "b"])
    assert addresses.connect_seconds("a") == SESSION_CONNECT_SECONDS
    addresses.lost("a", 60.0, silent=True)
    waits = []
    for _ in range(5):
        waits.append(addresses.connect_seconds("a"))
        addresses.timed_out("a")
    assert waits == [0.5, 1.0, 2.0, 4.0, SESSION_CONNECT_SECONDS]
    assert addresses.connect_seconds("b") == SESSION_CONNECT_SECONDS
    addresses.lost("a", 0.1)
    assert addresses.connect_seconds("a") == SESSION_CONNECT_SECONDS, "it answered in between"


def test_a_lighthouse_that_did_not_answer_is_last_in_every_pass() -> None:
    addresses = Addresses(["a", "b", "c"])
    addresses.next(1.0)
    addresses.timed_out("a")
    assert [address for _, address in delays(addresses, 5)] == ["b", "c", "b", "c", "a"]


def test_a_silent_lighthouse_is_asked_again_although_another_names_it_the_leader() -> None:
    addresses = Addresses(["a", "b"])
    addresses.lost("a", 60.0, silent=True)
    tried = []
    for _ in range(4):
        _, address = addresses.next(1.0)
        tried.append(address)
        if address == "b":
            addresses.follow("a")
    assert tried == ["b", "a", "b", "a"]


def test_a_silent_leader_that_is_known_by_another_address_is_tried_last_too() -> None:
    addresses = Addresses(["a", "b"])
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "c")
    addresses.lost("c", 60.0, silent=True)
    tried = []
    for _ in range(6):
        _, address = addresses.next(1.0)
        tried.append(address)
        if address == "a":
            addresses.follow("c")
    assert tried == ["a", "b", "c", "a", "b", "c"]


def test_connections_that_break_at_once_are_not_hammered() -> None:
    addresses = Addresses(["a"])
    waits = []
    for _ in range(12):
        delay, _ = addresses.next(1.0)
        waits.append(delay)
        addresses.lost("a", 0.01)
    assert waits[0] == 0.0
    assert waits[-1] == PASS_BACKOFF.most


def test_the_named_leader_is_next_but_only_once_in_a_pass() -> None:
    addresses = Addresses(["a", "b"])
    assert addresses.next(1.0) == (0.0, "a")
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "c")
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "b")
    assert addresses.next(1.0) == (0.02, "a")
    addresses.follow("c")
    assert addresses.next(1.0) == (0.0, "c")


def test_a_leader_named_by_one_that_we_were_connected_to_comes_before_it() -> None:
    addresses = Addresses(["a", "b"])
    addresses.next(1.0)
    addresses.follow("c")
    addresses.lost("a", 60.0)
    assert delays(addresses, 2) == [(0.0, "c"), (0.0, "a")]


def test_two_that_name_each_other_do_not_keep_us_running_in_circles() -> None:
    addresses = Addresses(["a", "b"])
    waited = 0.0
    for _ in range(30):
        delay, address = addresses.next(1.0)
        waited += delay
        addresses.follow("b" if address == "a" else "a")
    assert waited > 1.0


def test_no_address_is_an_error_that_says_where_to_set_one() -> None:
    with pytest.raises(ValueError, match="KEEPSTEP_LIGHTHOUSE"):
        Addresses([])


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
    told = QuorumAnswer(1, 1, 1, 0, 1, 0, "", 0, (), allow_heal=False)
    assert not core.answered(told).allow_heal


def test_the_relays_of_durable_checkpoints_are_sent_when_they_change_and_on_a_new_connection() -> None:
    core, sent = core_in_session(), []
    for relays in ((), ("r1",), ("r1",), ("r2",)):
        core.ask(request(7, durable_relays=relays))
        sent.append(core.to_send(1000).durable_relays)
    assert sent == [(), ("r1",), (), ("r2",)]
    core.hello()
    assert core.to_send(1000).durable_relays == ("r2",)
