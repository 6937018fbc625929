"""Correct parts of a failed transfer are not fetched again."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from keepstep.checkpointing import HTTPTransport, RelayTransport
from keepstep.state.values.tensors_in_containers import tensors_in
from tests.support.checkpoints.checkpoint_ends import MIB, Proxy, address, blank, same, weights
from tests.support.checkpoints.checkpoint_peer import MINUTE, exchange, state_of

SIZE = 40
CHUNK_MIB = 8
LIMIT = timedelta(seconds=60)


class BrokeOff(Exception):
    """Any error."""


@pytest.fixture
def source() -> Any:
    one: HTTPTransport[Any] = HTTPTransport(MINUTE, 1, hostname="127.0.0.1")
    one.send_checkpoint([1], 1, state_of(1, SIZE), MINUTE)
    yield one
    one.shutdown()


@pytest.fixture
def joiner() -> Any:
    one: HTTPTransport[Any] = HTTPTransport(MINUTE, 1, hostname="127.0.0.1")
    yield one
    one.shutdown()


def breaks_off(joiner: HTTPTransport[Any], source: HTTPTransport[Any], into: Any) -> None:
    """A transfer that fails when two of its five chunks are there."""

    def stop(done: int, _total: int) -> None:
        if done >= 2 * CHUNK_MIB * MIB:
            raise BrokeOff

    with pytest.raises(BrokeOff):
        joiner.recv_checkpoint(0, source.metadata(), 1, MINUTE, into=into, progress=stop)


def fetched_mib(joiner: HTTPTransport[Any], source: HTTPTransport[Any], into: Any, step: int = 1) -> float:
    """Return the bytes that the next transfer takes from the source until it succeeds."""
    with Proxy(address(source), lambda _number, _so_far, data: data) as proxy:
        state = joiner.recv_checkpoint(0, proxy.url, step, MINUTE, into=into, limit=LIMIT)
        assert same(state, state_of(1, SIZE) | {"manager": {"step": step}})
        return proxy.passed / MIB


@pytest.mark.parametrize("in_place", [True, False], ids=["into tensors", "into memory of its own"])
def test_the_next_attempt_fetches_only_what_is_not_there(source: Any, joiner: Any, in_place: bool) -> None:
    into = blank(SIZE) if in_place else None
    breaks_off(joiner, source, into)
    assert fetched_mib(joiner, source, into) < SIZE - 2 * CHUNK_MIB + 1
    assert fetched_mib(joiner, source, blank(SIZE)) > SIZE, "a transfer that succeeded leaves nothing behind"


def test_another_source_of_the_same_state_will_do_and_another_step_with_equal_chunks(source: Any, joiner: Any) -> None:
    breaks_off(joiner, source, None)
    other: HTTPTransport[Any] = HTTPTransport(MINUTE, 1, hostname="127.0.0.1")
    try:
        other.send_checkpoint([1], 2, state_of(1, SIZE) | {"manager": {"step": 2}}, MINUTE)
        assert fetched_mib(joiner, other, None, step=2) < SIZE - 2 * CHUNK_MIB + 1
    finally:
        other.shutdown()


def test_tensors_that_changed_or_are_of_another_state_are_fetched(source: Any, joiner: Any) -> None:
    into = blank(SIZE)
    breaks_off(joiner, source, into)
    weights(into)[0] += 1  # in the first chunk
    assert SIZE - CHUNK_MIB - 1 < fetched_mib(joiner, source, into) < SIZE - CHUNK_MIB + 1
    breaks_off(joiner, source, into := blank(SIZE))
    source.send_checkpoint([1], 2, state_of(2, SIZE), MINUTE)
    got = joiner.recv_checkpoint(0, source.metadata(), 2, MINUTE, into=into)
    assert same(got, state_of(2, SIZE))


def test_memory_of_a_state_of_another_shape_is_not_kept(source: Any, joiner: Any) -> None:
    breaks_off(joiner, source, None)
    source.send_checkpoint([1], 2, {"user": torch.arange(5)}, MINUTE)
    got = joiner.recv_checkpoint(0, source.metadata(), 2, MINUTE)
    assert got["user"].tolist() == [0, 1, 2, 3, 4]
    assert joiner._spare is None


def test_one_of_several_joiners_keeps_it_too(source: Any) -> None:
    joiner: RelayTransport[Any] = RelayTransport(MINUTE, list, hostname="127.0.0.1")
    try:
        joiner.prepare(exchange("j0", ["s0"], ["j0", "j1"], beside=["j0", "j1"]))
        breaks_off(joiner, source, None)
        assert fetched_mib(joiner, source, None) < SIZE - 2 * CHUNK_MIB + 1
        assert joiner.via == "direct"
    finally:
        joiner.shutdown()


def elsewhere(state: Any) -> Any:
    """Return the state in tensors with gaps, whose memory is not received into: as that of a device."""
    if isinstance(state, dict):
        return {key: elsewhere(value) for key, value in state.items()}
    if not isinstance(state, torch.Tensor):
        return state
    return torch.empty((*state.shape, 2), dtype=state.dtype)[..., 0].copy_(state)


@pytest.mark.parametrize("place", [lambda state: state, elsewhere], ids=["in place", "elsewhere"])
def test_a_state_that_is_there_already_is_not_fetched(source: Any, joiner: Any, place: Any) -> None:
    joiner.keep_present()
    assert fetched_mib(joiner, source, place(state_of(1, SIZE))) < 1
    other = place(state_of(1, SIZE))
    next(one for one in tensors_in(other) if one.numel() > 1).view(-1)[:1].zero_()
    joiner.keep_present()
    assert CHUNK_MIB - 1 < fetched_mib(joiner, source, other) < CHUNK_MIB + 1
    assert fetched_mib(joiner, source, place(blank(SIZE))) > SIZE, "the next transfer compares nothing"
