"""Choice of the peer for each chunk: the rules one by one, then whole swarms in virtual time."""

from __future__ import annotations

import pytest

from keepstep.transfer.peer_choice import (
    PATIENCE_FACTOR,
    PEER_PATIENCE_SECONDS,
    PEERS_AT_ONCE,
    RELAY,
    SLOW_CHUNK_SECONDS,
    SOURCE,
    Swarm,
)
from tests.support.models.swarm_model import Network


def bits(*chunks):
    return sum(1 << chunk for chunk in chunks)


def test_one_joiner_takes_all_from_the_relay_in_the_order_in_which_they_are_uploaded():
    swarm = Swarm(5, 0, 1, 0.0)
    for chunk in range(5):
        assert swarm.take(RELAY, 0.0) == chunk
        swarm.record_arrival(chunk, 0.0)
    assert swarm.take(RELAY, 0.0) is None
    assert swarm.finished
    assert swarm.done == bits(*range(5))


def test_a_joiner_takes_its_own_chunks_first_and_those_of_others_from_them():
    swarm = Swarm(8, 1, 4, 0.0)
    swarm.set_peer_chunks("j2", bits(2))
    assert [swarm.take(RELAY, 0.0), swarm.take(RELAY, 0.0)] == [1, 5]
    assert swarm.take("j2", 0.0) == 2
    assert swarm.take("j2", 0.0) is None, "it has no other"
    assert swarm.take(RELAY, 0.0) is None, "the owners of the others will bring them"


def test_chunks_that_no_peer_brings_come_from_the_relay_after_a_while():
    swarm = Swarm(4, 0, 2, 0.0)
    for _ in (0, 2):
        swarm.record_arrival(swarm.take(RELAY, 1.0), 1.0)
    assert swarm.take(RELAY, 1.0 + PEER_PATIENCE_SECONDS / 2) is None
    late = 1.0 + PEER_PATIENCE_SECONDS
    first = swarm.take(RELAY, late)
    assert first in (1, 3)
    swarm.record_arrival(first, late)
    assert swarm.take(RELAY, late) == 4 - first, "it is waited once, not before each chunk"


def test_the_rarest_chunk_of_a_peer_comes_first():
    swarm = Swarm(6, 0, 3, 0.0)
    swarm.set_peer_chunks("a", bits(1, 2, 4))
    swarm.set_peer_chunks("b", bits(1, 4))
    assert swarm.take("a", 0.0) == 2


def test_few_peers_are_asked_at_once_and_slow_ones_do_not_count():
    swarm = Swarm(12, 0, 6, 0.0)
    for peer in "abcd":
        swarm.set_peer_chunks(peer, bits(*range(12)))
    asked = [swarm.take(peer, 0.0) for peer in "abcd"]
    assert sum(chunk is not None for chunk in asked) == PEERS_AT_ONCE
    assert swarm.take("c", SLOW_CHUNK_SECONDS + 0.1) is not None, "those who were asked first are slow"


def test_whether_some_peer_may_be_asked():
    swarm = Swarm(2, 0, 2, 0.0)
    swarm.set_peer_chunks("a", bits(0))
    swarm.set_peer_chunks("b", bits(0, 1))
    assert swarm.can_ask_peer(0.0)
    assert swarm.take("a", 0.0) == 0
    assert not swarm.can_ask_peer(0.0), "one at a time"
    assert swarm.can_ask_peer(SLOW_CHUNK_SECONDS + 0.1)
    swarm.forget("b")
    assert not swarm.can_ask_peer(SLOW_CHUNK_SECONDS + 0.1), "no peer has the other"


def test_a_chunk_from_the_relay_instead_of_a_peer_does_not_restart_the_wait():
    swarm = Swarm(4, 0, 2, 0.0)
    swarm.set_peer_chunks("a", bits(1, 3))
    for _ in (0, 2):
        swarm.record_arrival(swarm.take(RELAY, 0.0), 0.0)
    late = PEER_PATIENCE_SECONDS
    swarm.record_arrival(swarm.take(RELAY, late), late)
    assert swarm.take(RELAY, late) is not None


def test_a_joiner_on_a_slow_network_waits_longer_before_it_takes_more_from_the_relay():
    swarm = Swarm(4, 0, 2, 0.0)
    for _ in (0, 2):
        swarm.record_arrival(swarm.take(RELAY, 0.0), 10.0)
    assert swarm.take(RELAY, 10.0 + PEER_PATIENCE_SECONDS) is None
    assert swarm.take(RELAY, 10.0 + PATIENCE_FACTOR * 10.0) is not None


def test_the_source_is_asked_only_when_it_has_to_be():
    swarm = Swarm(2, 0, 1, 0.0)
    assert swarm.take(SOURCE, 0.0) is None
    swarm.use_source = True
    assert swarm.take(SOURCE, 0.0) == 0


def test_a_chunk_is_asked_of_one_at_a_time_and_of_anybody_after_it_failed():
    swarm = Swarm(1, 0, 1, 0.0)
    swarm.use_source = True
    assert swarm.take(RELAY, 0.0) == 0
    assert swarm.take(SOURCE, 0.0) is None
    swarm.failed(0)
    assert not swarm.finished
    assert swarm.take(SOURCE, 0.0) == 0


def test_a_forgotten_peer_is_not_asked():
    swarm = Swarm(2, 0, 2, 0.0)
    swarm.set_peer_chunks("a", bits(0, 1))
    swarm.forget("a")
    assert swarm.take("a", 0.0) is None


def test_a_peer_is_slow_only_once_there_is_nothing_else_to_do():
    swarm = Swarm(2, 1, 2, 0.0)
    swarm.set_peer_chunks("a", bits(0))
    swarm.take("a", 0.0)
    assert swarm.slow(SLOW_CHUNK_SECONDS + 1) == set()
    swarm.record_arrival(swarm.take(RELAY, 0.0), 0.1)
    assert swarm.slow(SLOW_CHUNK_SECONDS / 2) == set()
    assert swarm.slow(SLOW_CHUNK_SECONDS + 1) == {"a"}


def test_a_relay_that_waits_for_an_upload_is_not_slow():
    swarm = Swarm(1, 0, 1, 0.0)
    swarm.take(RELAY, 0.0)
    assert swarm.slow(1000.0) == set()
    swarm.use_source = True
    assert swarm.slow(1000.0) == {RELAY}


def test_a_peer_cannot_say_that_it_has_more_chunks_than_there_are():
    swarm = Swarm(2, 0, 2, 0.0)
    swarm.set_peer_chunks("a", bits(0, 1, 77))
    assert swarm.peers["a"] == bits(0, 1)
    assert swarm.peers_finished()


@pytest.mark.parametrize("seed", range(5))
def test_eight_joiners_take_little_longer_than_one_and_the_relay_sends_one_copy(seed):
    alone, together = Network(1, 48, seed), Network(8, 48, seed)
    assert together.run() <= 1.25 * alone.run()
    assert together.sent_by[RELAY] <= 1.05 * 48


@pytest.mark.parametrize("seed", range(5))
def test_of_few_chunks_eight_joiners_take_at_most_half_as_long_again_as_one(seed):
    assert Network(8, 16, seed).run() <= 1.5 * Network(1, 16, seed).run()


@pytest.mark.parametrize("seed", range(5))
def test_the_others_get_everything_when_one_is_lost(seed):
    assert Network(6, 30, seed).run(lost="j2") <= 1.8 * Network(1, 30, seed).run()
