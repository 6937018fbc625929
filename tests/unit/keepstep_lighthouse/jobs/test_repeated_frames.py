"""Equal frames of many groups are decoded once."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.jobs.repeated_frames import MAX_BYTES, MAX_REMEMBERED, RepeatedFrames
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import QuorumRequest


def frame(number: int, info: MemberInfo | None = None) -> bytes:
    return codec.encode(QuorumRequest(number, 5, 1, shrink_only=False, commit_failures=0, timeout_ms=1000, info=info))


def test_equal_requests_of_many_groups_are_decoded_once_and_others_as_ever() -> None:
    frames = RepeatedFrames()
    first = frames.decode(frame(1))
    assert frames.decode(frame(1)) is first
    assert frames.decode(frame(2)) == codec.decode(frame(2)) != first


def test_a_long_frame_is_not_remembered_nor_are_more_frames_than_the_limit() -> None:
    frames, long = RepeatedFrames(), frame(0, MemberInfo("x" * MAX_BYTES))
    assert frames.decode(long) == frames.decode(long) is not frames.decode(long)
    first = frames.decode(frame(0))
    for number in range(MAX_REMEMBERED):
        frames.decode(frame(number))
    assert frames.decode(frame(0)) is first, "the limit is reached, not exceeded"
    frames.decode(frame(MAX_REMEMBERED))
    assert frames.decode(frame(0)) is not first


def test_an_invalid_frame_is_refused_each_time() -> None:
    frames = RepeatedFrames()
    for _ in range(2):
        with pytest.raises(ProtocolError, match="not msgpack"):
            frames.decode(b"\xc1")
