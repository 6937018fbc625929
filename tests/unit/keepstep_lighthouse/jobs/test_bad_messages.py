"""Which sessions that broke the protocol are logged."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.jobs.lighthouse_node import BadMessages


def test_the_first_of_many_is_logged_and_all_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    bad = BadMessages()
    for number in range(20):
        bad.add(f"job-{number}", "r0:1", "not a message")
    assert [record.getMessage() for record in caplog.records] == [
        "bad message job=job-0 replica_id=r0:1 reason=not a message bad_messages=1"
    ]
    assert bad.total == 20
