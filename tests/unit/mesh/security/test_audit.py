"""Who is written into the audit log, and how much of a flood of refusals."""

from __future__ import annotations

import pytest

from keepstep_mesh.security.audit import Caller, LogLimiter
from keepstep_mesh.security.tokens import Role


@pytest.mark.parametrize(
    ("caller", "text"),
    [
        (Caller("10.0.0.7", Role.ADMIN, "alice", "ops"), "admin alice (certificate ops) at 10.0.0.7"),
        (Caller("10.0.0.7", Role.ADMIN), "admin at 10.0.0.7"),
        (Caller("::1", certificate="ops"), "nobody (certificate ops) at ::1"),
    ],
)
def test_a_caller_is_named_as_far_as_it_is_known(caller: Caller, text: str) -> None:
    assert str(caller) == text


def test_the_first_of_many_is_written_and_the_rest_counted_into_the_next() -> None:
    ration = LogLimiter(seconds=10.0)
    assert [ration.take("a", now) for now in (0.0, 1.0, 9.9, 10.0, 10.1, 30.0)] == [0, None, None, 2, None, 1]


def test_each_address_has_a_ration_of_its_own() -> None:
    ration = LogLimiter(seconds=10.0)
    assert (ration.take("a", 0.0), ration.take("b", 0.0), ration.take("a", 1.0)) == (0, 0, None)


def test_many_addresses_take_no_more_memory_and_the_oldest_is_forgotten() -> None:
    ration = LogLimiter(seconds=10.0, max_keys=2)
    for key in "abc":
        assert ration.take(key, 0.0) == 0
    assert ration.take("c", 1.0) is None
    assert ration.take("a", 1.0) == 0
    assert len(ration._written) == 2
