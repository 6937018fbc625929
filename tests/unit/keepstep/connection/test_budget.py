"""The uplink that healing may take from training."""

from __future__ import annotations

import pytest

from keepstep.connection.rate_limiter import BURST_SECONDS, RateLimiter


def test_without_a_limit_nothing_waits():
    assert RateLimiter(None).delay(1 << 40, 0.0) == 0.0


def test_bytes_never_exceed_the_rate_by_more_than_a_burst():
    budget, now, sent = RateLimiter(100.0), 50.0, 0.0
    for size in (10, 300, 1, 80, 500, 7):
        now += budget.delay(size, now)
        assert sent <= 100.0 * (now - 50.0 + BURST_SECONDS) + 1e-6
        sent += size


def test_time_that_was_not_used_is_not_saved_up():
    budget = RateLimiter(100.0)
    budget.delay(100, 0.0)
    assert budget.delay(100, 1000.0) == 0.0
    assert budget.delay(100, 1000.0) == pytest.approx(1.0 - BURST_SECONDS)


def test_a_rate_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="uplink must be positive"):
        RateLimiter(0.0)
