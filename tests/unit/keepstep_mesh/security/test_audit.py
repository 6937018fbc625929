"""The caller in a line of the audit log."""

from __future__ import annotations

import pytest

from keepstep_mesh.security.tokens import Role
from keepstep_mesh.serving.application import Caller


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
