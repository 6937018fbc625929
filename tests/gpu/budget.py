"""The time of a whole run, divided over its checks. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tests.gpu.check import Check

TOTAL_SECONDS = 480.0
"""Limit of a run of all checks."""
END_SECONDS = 15.0
"""Part of it in which the last check is killed and the report is written."""
LEAST_SECONDS = 20.0
"""A check does not begin with less: its ranks import torch and connect first."""


@dataclass(frozen=True, slots=True)
class Budget:
    """``total``: seconds for all checks and for the end."""

    total: float = TOTAL_SECONDS

    def limited(self, check: Check, spent: float) -> Check | None:
        """Return ``check`` with the time that it may take; None: too little is left.

        A longer run than usual gives each check a longer limit of its own.

        Args:
            check: the next check.
            spent: seconds since the begin of the run.
        """
        left = self.total - END_SECONDS - spent
        if left < LEAST_SECONDS:
            return None
        return replace(check, whole_seconds=left, seconds=check.seconds * max(1.0, self.total / TOTAL_SECONDS))
