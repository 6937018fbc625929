"""The policy of a job: the one declaration of each of its fields. Pure.

The lighthouse checks and stores a policy, its REST API describes it, ``keepstep`` makes its flags of it, and the
dashboard its dialog. Each reads what is declared here.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MAX_SECONDS = 10 * 365 * 86400.0
MAX_REPLICAS = 100_000
MAX_STEPS = 1_000_000_000
MAX_HEAL_DOUBLINGS = 10
MIN_HEARTBEAT_TIMEOUT = 0.1
"""A worker sends ten heartbeats within it, and a busy machine is late by hundredths of a second."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Meaning of a field of the policy, and its valid values."""

    text: str
    """Sentence without a full stop, for help texts."""
    lowest: float = 0
    highest: float = MAX_SECONDS
    zero: str = ""
    """Meaning of 0, if it is a special one."""
    none: str = ""
    """Meaning of None."""
    unit: str = ""
    choices: tuple[str, ...] = ()

    @property
    def help(self) -> str:
        return f"{self.text}; 0: {self.zero}" if self.zero else self.text

    def schema(self) -> dict[str, Any]:
        """Return the keywords for the JSON schema of the field."""
        described: dict[str, Any] = {
            "description": f"{self.help}; without a value: {self.none}" if self.none else self.help
        }
        if self.choices:
            return described | {"enum": list(self.choices)}
        if self.unit:
            described |= {"minimum": self.lowest, "maximum": self.highest, "x-unit": self.unit}
        return described

    def problem(self, name: str, value: Any) -> str | None:
        """Return what is wrong with a value, as a sentence; None: it is valid."""
        if self.choices:
            right, allowed = value in self.choices, f"one of {', '.join(self.choices)}"
        else:
            right = not self.unit or value is None or self.lowest <= value <= self.highest
            allowed = self._range()
        return None if right else f"{name} must be {allowed}, not {value!r:.40}"

    def _range(self) -> str:
        if self.unit == SECONDS:
            return f"a time from 0 s to {self.highest:.0f} s"
        if self.lowest:
            return f"at least {self.lowest} (at most {self.highest})"
        special = f" ({self.zero})" if self.zero else ""
        steps = " steps" if self.unit == STEPS else ""
        return f"0{special} or more{steps} (at most {self.highest})"


GROUPS, STEPS, SECONDS = "groups", "steps", "seconds"
"""Values of ``Setting.unit``; empty: the field is no number."""


def _field(default: Any, setting: Setting) -> Any:
    return field(default=default, metadata={"setting": setting, "schema": setting.schema()})


def _groups(default: int, text: str, *, lowest: int = 0, zero: str = "") -> Any:
    return _field(default, Setting(text, lowest, MAX_REPLICAS, zero, unit=GROUPS))


def _steps(default: int, text: str, *, zero: str) -> Any:
    return _field(default, Setting(text, 0, MAX_STEPS, zero, unit=STEPS))


def _seconds(default: float | None, text: str, *, zero: str = "", none: str = "") -> Any:
    return _field(default, Setting(text, zero=zero, none=none, unit=SECONDS))


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of one job; times in seconds."""

    min_replicas: int = _groups(1, "Minimum number of groups in a quorum", lowest=1)
    max_replicas: int = _groups(0, "Maximum number of groups in a quorum", zero="no limit")
    initial_replicas: int = _groups(0, "Groups that the first quorum of a job waits for, up to the join timeout")
    """Up to half of the time limit of the open requests, too; 0: the number that the groups tell. A later quorum waits
    for it only with ``refuse_going_back``, after the loss of all members."""
    join_timeout: float = _seconds(60.0, "Maximum wait for groups that have not asked")
    heal_timeout: float = _seconds(60.0, "Maximum wait for a group that heals")
    heartbeat_timeout: float = _seconds(5.0, "A group that is silent for this time is lost")
    reconnect_grace: float = _seconds(0.2, "Time in which a group may reconnect after its connection broke")
    takeover_grace: float | None = _seconds(
        None, "Time after a restart in which no group is lost", none="the heartbeat timeout"
    )
    verify_every: int = _steps(
        1000,
        "Compare the weights of all groups at each step that this divides, at the steps 10 and 100, after changes of "
        "members and heals, and at the end",
        zero="never",
    )
    """0: only when ordered."""
    on_divergence: str = _field(
        "heal",
        Setting("Action for a group whose weights differ from the majority", choices=("heal", "drain", "report")),
    )
    """``heal``: it receives the state of another group; ``drain``: it heals and then leaves; ``report``: none."""
    drain_straggler_after: int = _steps(
        0, "Drain a group that was a straggler for this many steps in a row", zero="never"
    )
    refuse_going_back: bool = _field(
        False, Setting("Refuse a start more than one step below the step that the job has reached")
    )
    finish_grace: float = _seconds(30.0, "Time for which groups that have finished wait for a lost group to return")
    hang_after: float | None = _seconds(
        None,
        "End a group whose step takes this time while its stacks stay the same",
        zero="never",
        none="five times the longest of the last steps, at least 60 s",
    )
    job_ttl: float = _seconds(7 * 86400.0, "Delete a job after this time without sessions", zero="never")


SETTINGS: dict[str, Setting] = {one.name: one.metadata["setting"] for one in fields(Policy)}
"""By the names of the fields."""


def policy_problem(policy: Policy) -> str | None:
    """Return what is wrong with a policy, as a sentence; None: it is valid."""
    problems = (setting.problem(name, getattr(policy, name)) for name, setting in SETTINGS.items())
    if (problem := next(filter(None, problems), None)) is not None:
        return problem
    if 0 < policy.max_replicas < policy.min_replicas:
        return (
            f"max_replicas {policy.max_replicas} is less than min_replicas {policy.min_replicas}: no quorum could ever "
            f"form; change both together"
        )
    if policy.heartbeat_timeout < MIN_HEARTBEAT_TIMEOUT:
        return (
            f"heartbeat_timeout must be at least {MIN_HEARTBEAT_TIMEOUT:g} s, not {policy.heartbeat_timeout:g}: "
            f"groups that are alive would be lost"
        )
    return None


def policy_changes(before: Policy, after: Policy) -> list[str]:
    """Return the names of the fields that differ."""
    return [name for name in SETTINGS if getattr(before, name) != getattr(after, name)]


def heal_limit(heal_timeout: float, failed: int) -> float:
    """Return the limit of a heal, as the lighthouse and the group that heals both compute it.

    Args:
        heal_timeout: of the job's policy; the limit of the first heal has the same unit.
        failed: heals of this group that took too long, in a row. Each doubles the limit of the next.
    """
    return heal_timeout * 2.0 ** min(failed, MAX_HEAL_DOUBLINGS)
