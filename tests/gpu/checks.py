"""All checks, in the order in which they run: the most important first, because the time of a run is limited."""

from __future__ import annotations

from tests.gpu import (
    abort_checks,
    collective_checks,
    device_checks,
    native_checks,
    sharded_checks,
    torchft_checks,
    torchtitan_checks,
    training_checks,
)

_FIRST = (
    "collectives",
    "abort_killed",
    "kill_and_heal",
    "streams",
    "abort_stopped",
    "abort_configure",
    "reconfigure",
    "step_cost",
    "hsdp",
    "staging",
    "heal",
    "quantized",
    "abort_missing",
    "time_two",
    "native",
    "members",
    "catch_up",
    "baby",
    "fork",
)
_LAST = ("train_compile", "torchtitan", "watchdog")
"""They take a minute or more."""

_ALL = {
    one.name: one
    for one in (
        *collective_checks.CHECKS,
        *abort_checks.CHECKS,
        *device_checks.CHECKS,
        *training_checks.CHECKS,
        *sharded_checks.CHECKS,
        *native_checks.CHECKS,
        *torchft_checks.CHECKS,
        *torchtitan_checks.CHECKS,
    )
}
CHECKS = {name: _ALL[name] for name in (*_FIRST, *(one for one in _ALL if one not in (*_FIRST, *_LAST)), *_LAST)}
