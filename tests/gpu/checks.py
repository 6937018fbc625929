"""All checks, in the order in which they run: the most important first, because the time of a run is limited."""

from __future__ import annotations

from tests.gpu import (
    abort_checks,
    collective_checks,
    device_checks,
    job_checks,
    native_checks,
    sharded_checks,
    torchft_checks,
    torchtitan_checks,
    training_checks,
)

_FIRST = (
    "collectives",
    "abort_killed",
    "abort_stopped",
    "abort_missing",
    "kill_and_heal",
    "hsdp",
    "one_copy",
    "catch_up",
    "warm_start",
    "staging",
    "step_cost",
    "watchdog",
    "quantized",
    "streams",
    "abort_configure",
    "heal",
    "reconfigure",
    "time_two",
    "native",
    "members",
    "baby",
    "fork",
)
_LAST = ("train_compile", "torchtitan")
"""They take a minute or more."""

_ALL = {
    one.name: one
    for one in (
        *collective_checks.CHECKS,
        *abort_checks.CHECKS,
        *device_checks.CHECKS,
        *training_checks.CHECKS,
        *sharded_checks.CHECKS,
        *job_checks.CHECKS,
        *native_checks.CHECKS,
        *torchft_checks.CHECKS,
        *torchtitan_checks.CHECKS,
    )
}
CHECKS = {name: _ALL[name] for name in (*_FIRST, *(one for one in _ALL if one not in (*_FIRST, *_LAST)), *_LAST)}
