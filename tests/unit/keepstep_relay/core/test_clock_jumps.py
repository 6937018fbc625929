"""A clock that jumps, between two events of a relay or while it was down, drops no last good checkpoint."""

from __future__ import annotations

import pytest

from keepstep_relay.core.checkpoint import NEVER
from keepstep_relay.core.events import Begun, Facts, Forget, HolderReported, Kind, State, TableArrived, Tick
from tests.unit.keepstep_relay.core.core_driver import C1, C2, C3, DISK, ONE, A, B, C, Driver, table

YEARS = 10 * 365 * 86400.0
LIMITS = {"keep_live": 2, "durable_seconds": 60.0, "upload_seconds": 5.0}


def forgotten(decisions):
    return {one.key for one in decisions if isinstance(one, Forget)}


def test_a_jump_of_years_ends_uploads_and_drops_what_is_old_but_never_the_newest():
    relay = Driver(**LIMITS, live_ttl_seconds=0)
    relay.stored(C1, A, step=1, tier=DISK, kind=Kind.DURABLE)
    relay.stored(C2, B, step=2, tier=DISK, kind=Kind.DURABLE)
    relay(Begun(C3, Facts(3, Kind.DURABLE, 2)), TableArrived(C3, 0, table(C)))
    relay(HolderReported(C2, 0, "joiner", "http://10.0.0.1:1", b"\x01"))
    assert forgotten(relay(Tick(), at=YEARS)) == {C1, C3}
    assert relay.core.ended[C3].state is State.ABORTED
    assert relay.core.checkpoints[C2].holders == {}, "its lease is over"
    assert relay.core.deadline() == NEVER


def test_a_jump_back_drops_nothing_and_every_deadline_still_comes():
    relay = Driver(**LIMITS, live_ttl_seconds=100.0)
    relay.now = YEARS
    relay.stored(C1, A, step=1)
    relay(Begun(C2, ONE))
    assert relay(Tick(), at=0.0) == []
    relay.stored(C3, B, step=3)
    assert relay(Tick(), at=1.0) == []
    assert forgotten(relay(Tick(), at=YEARS + 200.0)) == {C2, C3}
    assert forgotten(relay(Tick(), at=YEARS + 400.0)) == {C1}, "it is the newest now"


@pytest.mark.parametrize(("committed", "left"), [(-YEARS, {C2}), (YEARS, {C1, C2})])
def test_a_clock_that_jumped_while_the_relay_was_down_changes_ages_but_keeps_the_newest(committed, left):
    """``committed``: where the new clock has the commits, relative to the start."""
    relay = Driver(**LIMITS)
    for key, step, digest in ((C1, 1, A), (C2, 2, B)):
        relay.core.restore(key, Facts(step, Kind.DURABLE, 1), {0: table(digest)}, committed, 0.0)
    relay(Tick(), at=1.0)
    assert set(relay.core.checkpoints) == left
    relay(Tick(), at=61.0)
    assert set(relay.core.checkpoints) == {C2}, "an age in the future ends too"
