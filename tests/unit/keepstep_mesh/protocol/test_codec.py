"""Frames: what goes in comes out, what is bad is a ProtocolError that says where."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from contextlib import suppress

import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import WithinGroup
from keepstep_mesh.protocol.membership import MAX_DATA_BYTES, Member, MemberInfo, Sentence
from keepstep_mesh.protocol.messages import (
    Denied,
    Failed,
    Healing,
    Heartbeat,
    Hello,
    Leave,
    MemberLost,
    Quorum,
    QuorumRequest,
    ToLighthouse,
    ToWorker,
)
from keepstep_mesh.text import printable

KINDS = [
    *typing.get_args(ToLighthouse),
    *typing.get_args(ToWorker),
    *typing.get_args(WithinGroup),
]

texts = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
whole = st.integers(0, 2**63 - 1)
data = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=10,
)


@functools.cache  # hypothesis prepares each new strategy again
def values(hint: object) -> st.SearchStrategy:
    simple = {
        bool: st.booleans(),
        int: whole,
        str: texts,
        Sentence: texts.map(printable),
        object: data,
        type(None): st.none(),
    }
    if hint in simple:
        return simple[hint]
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return st.one_of([values(choice) for choice in typing.get_args(hint)])
    if typing.get_origin(hint) is tuple:
        return st.lists(values(typing.get_args(hint)[0]), max_size=3).map(tuple)
    hints = typing.get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{field.name: values(hints[field.name]) for field in dataclasses.fields(hint)})


any_message = st.sampled_from(KINDS).flatmap(values)


def test_no_two_messages_have_the_same_kind() -> None:
    assert len({kind.kind for kind in KINDS}) == len(set(KINDS))


@given(any_message)
@settings(max_examples=400)
def test_every_message_comes_back_as_it_was(message) -> None:
    back = codec.decode(codec.encode(message))
    assert type(back) is type(message)
    assert back == message


def test_fields_that_an_older_peer_does_not_know_have_their_defaults() -> None:
    assert codec.decode(msgpack.packb(["hello", 1, 1, "r0"])) == Hello(1, 1, "r0")


@given(st.binary(max_size=300))
@settings(max_examples=500)
@example(b"")
@example(b"\x81\x90\x01")
@example(b"\xc7\x03\xff\x01\x02\x03")
@example(b"\x91" * 2000)
def test_garbage_is_a_protocol_error_and_nothing_else(frame) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(frame)


@given(any_message, st.data())
@settings(max_examples=500)
def test_a_damaged_frame_is_a_message_or_a_protocol_error(message, draw) -> None:
    frame = bytearray(codec.encode(message))
    for _ in range(draw.draw(st.integers(1, 4))):
        frame[draw.draw(st.integers(0, len(frame) - 1))] = draw.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        assert type(codec.decode(bytes(frame))) in KINDS


@given(st.sampled_from(KINDS), st.lists(data, max_size=12))
@settings(max_examples=200)
def test_well_formed_nonsense_is_a_message_or_a_protocol_error(kind, fields) -> None:
    with suppress(ProtocolError):
        assert isinstance(codec.decode(msgpack.packb([kind.kind, *fields])), kind)


def test_an_error_names_the_field_and_what_is_wrong_with_it() -> None:
    with pytest.raises(ProtocolError, match=r"hello\.replica_id must be a string, not int"):
        codec.decode(msgpack.packb(["hello", 1, 1, 7]))
    with pytest.raises(ProtocolError, match=r"ask\.step must be in \[0, 2\^63\), not -1"):
        codec.decode(msgpack.packb(["ask", 1, -1, "", False, 0, 1000]))
    with pytest.raises(ProtocolError, match=r"hello has 1 fields; expected at least 3"):
        codec.decode(msgpack.packb(["hello", 1]))
    with pytest.raises(ProtocolError, match=r"unknown kind of message 'nonsense'"):
        codec.decode(msgpack.packb(["nonsense"]))
    with pytest.raises(ProtocolError, match=r"healing\.bytes_per_second must be finite"):
        codec.decode(msgpack.packb(["healing", 1, 1, float("nan")]))


def test_a_boolean_is_no_integer() -> None:
    with pytest.raises(ProtocolError, match="must be an integer, not bool"):
        codec.decode(msgpack.packb(["cancel", True]))


def test_a_frame_beyond_the_limit_is_not_even_parsed() -> None:
    with pytest.raises(ProtocolError, match="limit 100"):
        codec.decode(b"\x91" * 101, limit_bytes=100)


def test_a_header_that_promises_a_huge_list_costs_nothing() -> None:
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"):
        with pytest.raises(ProtocolError):
            codec.decode(head)
    with pytest.raises(ProtocolError, match="exceeds max_array_len"):
        codec.decode((b"\xdd" + (1 << 20).to_bytes(4, "big")) * 200_000)


def test_long_texts_and_lists_are_refused() -> None:
    with pytest.raises(ProtocolError, match=r"leave\.cause too long: 5000 characters"):
        codec.decode(codec.encode(Leave("", "x" * 5000)))
    many = ("",) * (codec.MAX_ITEMS + 1)
    with pytest.raises(ProtocolError):
        codec.decode(codec.encode(QuorumRequest(1, 0, "", False, 0, 1, durable_relays=many)))


@pytest.mark.parametrize(
    "sent", [Leave, Failed, lambda text: Denied(1, "start", text), lambda text: Healing(0, 0, 0.0, error=text)]
)
def test_a_sentence_cannot_command_the_terminal_of_a_reader(sent) -> None:
    message = codec.decode(codec.encode(sent("bad\x1b[2J disk\n\x9b31m\u202e")))
    assert "bad\\x1b[2J disk\\n\\x9b31m\\u202e" in dataclasses.astuple(message)


@pytest.mark.parametrize("sent", ["x" * 5000, "\x1b" * 4096])
def test_a_long_sentence_is_cut_so_that_no_reader_refuses_one_that_contains_it(sent: str) -> None:
    left = codec.decode(codec.encode(Leave(sent)))
    assert isinstance(left, Leave)
    assert len(left.reason) == codec.MAX_TEXT
    told = codec.decode(codec.encode(MemberLost(1, "r0:1", f"it failed: {left.reason}")))
    assert isinstance(told, MemberLost)


def test_user_data_has_a_limit_that_both_sides_check() -> None:
    just = MemberInfo(data=b"x" * (MAX_DATA_BYTES - 3))
    codec.check_info(just)
    with pytest.raises(ProtocolError, match=rf"info\.data too large: {MAX_DATA_BYTES + 1} bytes"):
        codec.check_info(MemberInfo(data=b"x" * (MAX_DATA_BYTES - 2)))
    with pytest.raises(TypeError, match="object cannot be encoded"):
        codec.check_info(MemberInfo(data=object()))


@given(whole, values(Quorum))
def test_one_answer_for_many_is_byte_for_byte_what_each_would_get(request_number, answer) -> None:
    assert codec.answer_frames(answer)(request_number) == codec.encode(
        dataclasses.replace(answer, request=request_number)
    )


def test_an_unchanged_quorum_is_a_small_frame() -> None:
    answer = Quorum(1000, 5, 70, 1_700_000_000_000, 3, 100_000, 70, 0, uniform=True, listed=())
    assert len(codec.encode(answer)) <= 40
    assert len(codec.encode(Heartbeat())) <= 6


def test_members_without_data_share_nothing_with_the_frame() -> None:
    member = Member("r0", 1, 1, 0, False, MemberInfo("http://a:1"))
    frame = codec.encode(Quorum(1, 1, 1, 0, 1, 1, 1, 0, uniform=False, listed=(member,)))
    assert codec.decode(memoryview(frame)).members == (member,)
