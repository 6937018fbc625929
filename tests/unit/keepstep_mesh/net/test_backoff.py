"""The delay before the next attempt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from keepstep_mesh.net.backoff import Backoff

BACKOFF = Backoff(first=0.1, most=2.0)
draws = st.floats(0, 1, exclude_max=True)


def test_the_delay_doubles_up_to_its_limit():
    assert [BACKOFF.seconds(failures) for failures in range(1, 7)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0]


@given(st.integers(1, 10**6), draws)
def test_a_draw_spreads_clients_over_the_upper_half_of_the_delay(failures, draw):
    delay = BACKOFF.seconds(failures)
    assert delay / 2 <= BACKOFF.seconds(failures, draw) <= delay


@given(st.integers(1, 10**6), draws)
def test_a_further_failure_never_shortens_the_delay(failures, draw):
    assert BACKOFF.seconds(failures, draw) <= BACKOFF.seconds(failures + 1, draw)
