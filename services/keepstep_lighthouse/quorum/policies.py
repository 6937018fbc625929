"""Validation and comparison of policies. Pure."""

from __future__ import annotations

from dataclasses import fields

from keepstep_lighthouse.quorum.job_record import Policy

MAX_SECONDS = 10 * 365 * 86400.0
MAX_REPLICAS = 100_000
MAX_STEPS = 1_000_000_000
ON_DIVERGENCE = ("heal", "drain", "report")
MIN_HEARTBEAT_TIMEOUT = 0.1
"""A worker sends ten heartbeats within it, and a busy machine is late by hundredths of a second."""


def policy_problem(policy: Policy) -> str | None:
    """Return what is wrong with a policy, as a sentence; None: it is valid."""
    if not 1 <= policy.min_replicas <= MAX_REPLICAS:
        return f"min_replicas must be at least 1 (at most {MAX_REPLICAS}), not {policy.min_replicas!r:.40}"
    if not 0 <= policy.max_replicas <= MAX_REPLICAS:
        return f"max_replicas must be 0 (no limit) or more (at most {MAX_REPLICAS}), not {policy.max_replicas!r:.40}"
    if 0 < policy.max_replicas < policy.min_replicas:
        return (
            f"max_replicas {policy.max_replicas} is less than min_replicas {policy.min_replicas}: no quorum could ever "
            f"form; change both together"
        )
    if not 0 <= policy.initial_replicas <= MAX_REPLICAS:
        return f"initial_replicas must be 0 or more (at most {MAX_REPLICAS}), not {policy.initial_replicas!r:.40}"
    if not 0 <= policy.verify_every <= MAX_STEPS:
        return f"verify_every must be 0 (never) or more steps (at most {MAX_STEPS}), not {policy.verify_every!r:.40}"
    if not 0 <= policy.drain_straggler_after <= MAX_STEPS:
        return (
            f"drain_straggler_after must be 0 (never) or more steps (at most {MAX_STEPS}), not "
            f"{policy.drain_straggler_after!r:.40}"
        )
    if policy.on_divergence not in ON_DIVERGENCE:
        return f"on_divergence must be one of {', '.join(ON_DIVERGENCE)}, not {policy.on_divergence!r:.40}"
    for one in fields(policy):
        value = getattr(policy, one.name)
        if one.name.endswith(("_timeout", "_grace", "_ttl")) and value is not None and not 0 <= value <= MAX_SECONDS:
            return f"{one.name} must be a time from 0 s to {MAX_SECONDS:.0f} s, not {value!r:.40}"
    if policy.heartbeat_timeout < MIN_HEARTBEAT_TIMEOUT:
        return (
            f"heartbeat_timeout must be at least {MIN_HEARTBEAT_TIMEOUT:g} s, not {policy.heartbeat_timeout:g}: "
            f"groups that are alive would be lost"
        )
    return None


def policy_changes(before: Policy, after: Policy) -> list[str]:
    """Return the names of the fields that differ."""
    return [one.name for one in fields(Policy) if getattr(before, one.name) != getattr(after, one.name)]
