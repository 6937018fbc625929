"""How often a log line is written."""

from __future__ import annotations

from keepstep_mesh.config.log_limiter import LogLimiter


def test_the_first_of_many_is_written_and_the_next_counts_the_rest() -> None:
    limiter = LogLimiter(10.0)
    assert [limiter.take(now) for now in (0.0, 1.0, 9.9, 10.0, 10.1, 30.0)] == [0, None, None, 2, None, 1]
    assert [limiter.allows(now) for now in (30.1, 40.0)] == [False, True]


def test_each_key_has_a_limit_of_its_own() -> None:
    limiter = LogLimiter(10.0, max_keys=2)
    assert (limiter.take(0.0, "a"), limiter.take(0.0, "b"), limiter.take(1.0, "a")) == (0, 0, None)


def test_memory_is_limited_and_the_oldest_key_is_forgotten() -> None:
    limiter = LogLimiter(10.0, max_keys=2)
    for key in "abc":
        assert limiter.take(0.0, key) == 0
    assert limiter.take(1.0, "c") is None
    assert limiter.take(1.0, "a") == 0
    assert len(limiter._written) == 2


def test_after_a_reset_the_next_line_is_written() -> None:
    limiter = LogLimiter(10.0)
    assert limiter.allows(0.0)
    limiter.reset()
    assert limiter.allows(0.1)
