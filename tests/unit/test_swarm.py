"""Who asks whom for which chunk: the rules one by one, then whole swarms in virtual time."""

from __future__ import annotations

import heapq
import random

import pytest

from keepstep.checkpointing.swarm import PATIENCE_SECONDS, RELAY, SLOW_SECONDS, SOURCE, Swarm


def bits(*chunks):
    return sum(1 << chunk for chunk in chunks)


def test_one_joiner_takes_all_from_the_relay_in_the_order_in_which_they_are_uploaded():
    swarm = Swarm(5, 0, 1, 0.0)
    for chunk in range(5):
        assert swarm.take(RELAY, 0.0) == chunk
        swarm.came(chunk, 0.0)
    assert swarm.take(RELAY, 0.0) is None
    assert swarm.finished
    assert swarm.done == bits(*range(5))


def test_a_joiner_takes_its_own_chunks_first_and_those_of_others_from_them():
    swarm = Swarm(8, 1, 4, 0.0)
    swarm.tells("j2", bits(2))
    assert [swarm.take(RELAY, 0.0), swarm.take(RELAY, 0.0)] == [1, 5]
    assert swarm.take("j2", 0.0) == 2
    assert swarm.take("j2", 0.0) is None, "it has no other"
    assert swarm.take(RELAY, 0.0) is None, "the owners of the others will bring them"


def test_what_nobody_brings_is_taken_from_the_relay_after_a_while():
    swarm = Swarm(4, 0, 2, 0.0)
    for _ in (0, 2):
        swarm.came(swarm.take(RELAY, 1.0), 1.0)
    assert swarm.take(RELAY, 1.0 + PATIENCE_SECONDS / 2) is None
    late = 1.0 + PATIENCE_SECONDS
    first = swarm.take(RELAY, late)
    assert first in (1, 3)
    swarm.came(first, late)
    assert swarm.take(RELAY, late) == 4 - first, "it is waited once, not before each chunk"


def test_the_rarest_chunk_of_a_peer_comes_first():
    swarm = Swarm(6, 0, 3, 0.0)
    swarm.tells("a", bits(1, 2, 4))
    swarm.tells("b", bits(1, 4))
    assert swarm.take("a", 0.0) == 2


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
    swarm.tells("a", bits(0, 1))
    swarm.forget("a")
    assert swarm.take("a", 0.0) is None


def test_a_peer_is_slow_only_once_there_is_nothing_else_to_do():
    swarm = Swarm(2, 0, 2, 0.0)
    swarm.tells("a", bits(0, 1))
    swarm.take("a", 0.0)
    assert swarm.slow(SLOW_SECONDS + 1) == set()
    swarm.came(swarm.take(RELAY, 0.0), 0.1)
    assert swarm.slow(SLOW_SECONDS / 2) == set()
    assert swarm.slow(SLOW_SECONDS + 1) == {"a"}


def test_a_relay_that_waits_for_an_upload_is_not_slow():
    swarm = Swarm(1, 0, 1, 0.0)
    swarm.take(RELAY, 0.0)
    assert swarm.slow(1000.0) == set()
    swarm.use_source = True
    assert swarm.slow(1000.0) == {RELAY}


def test_a_peer_cannot_say_that_it_has_more_chunks_than_there_are():
    swarm = Swarm(2, 0, 2, 0.0)
    swarm.tells("a", bits(0, 1, 77))
    assert swarm.peers["a"] == bits(0, 1)
    assert swarm.peers_finished()


def swarm_of(joiners, chunks, seed, lost=None):
    """Everybody, and the relay, has an uplink of one chunk a second: a peer that is asked while it sends lets wait.

    The source uploads one chunk a second. Joiner ``lost`` dies after a third of the time. Gives the seconds until all
    others have all, and how many chunks the relay sent.
    """
    rng = random.Random(seed)
    swarms = [Swarm(chunks, me, joiners, 0.0) for me in range(joiners)]
    free = dict.fromkeys(range(joiners), 0.0)
    events, sent, now, number = [], 0, 0.0, 0
    lanes = {(me, of) for me in range(joiners) for of in (RELAY, *range(joiners)) if of != me}
    alive = set(range(joiners))
    slots = []

    def ask():
        nonlocal sent, number
        for me, of in rng.sample(sorted(lanes, key=str), len(lanes)):
            if me not in alive or (of != RELAY and of not in alive):
                continue
            chunk = swarms[me].take(of if of == RELAY else f"j{of}", now)
            if chunk is None:
                continue
            lanes.discard((me, of))
            if of == RELAY:  # which sends what has come, whoever asked first
                begins = max(now, chunk + 1.0)
                while any(abs(begins - one) < 1.0 for one in slots):
                    begins = min(one for one in slots if abs(begins - one) < 1.0) + 1.0
                slots.append(begins)
            else:
                begins = max(now, free[of])
                free[of] = begins + 1.0
            sent += of == RELAY
            number += 1
            heapq.heappush(events, (begins + 1.0, number, me, of, chunk))

    while not all(swarms[me].finished for me in alive):
        ask()
        assert events or swarms[0].idle(now) < 2 * PATIENCE_SECONDS, "nobody asks for anything any more"
        if not events or events[0][0] > now + 0.1:
            now += 0.1
        else:
            now, _, me, of, chunk = heapq.heappop(events)
            lanes.add((me, of))
            if me in alive and (of == RELAY or of in alive):
                swarms[me].came(chunk, now)
            elif me in alive:
                swarms[me].failed(chunk)
        if lost in alive and now > chunks / 3:
            alive.discard(lost)
            for swarm in swarms:
                swarm.forget(f"j{lost}")
        for me in alive:
            for other in alive - {me}:
                swarms[me].tells(f"j{other}", swarms[other].done)
    return now, sent


@pytest.mark.parametrize("seed", range(5))
def test_eight_joiners_take_little_longer_than_one_and_the_relay_sends_little_more_than_one_copy(seed):
    alone, _ = swarm_of(1, 48, seed)
    together, sent = swarm_of(8, 48, seed)
    assert together <= 1.2 * alone
    assert sent <= 1.2 * 48


@pytest.mark.parametrize("seed", range(5))
def test_the_others_get_everything_when_one_is_lost(seed):
    seconds, _ = swarm_of(6, 30, seed, lost=2)
    assert seconds <= 3 * 31
