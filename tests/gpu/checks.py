"""All checks, in the order in which they run."""

from __future__ import annotations

from tests.gpu import abort_checks, collective_checks, device_checks, training_checks

CHECKS = {
    one.name: one
    for one in (
        *collective_checks.CHECKS,
        *abort_checks.CHECKS,
        *device_checks.CHECKS,
        *training_checks.CHECKS,
    )
}
