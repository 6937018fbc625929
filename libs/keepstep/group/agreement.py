"""Settings and parameters that all groups of a job must have in common.

Groups send the settings that decide the arithmetic as text; the lighthouse compares them from the first request on, and
names the difference. Parameters, one line each, are known after a model is wrapped. Groups send a digest of them; a
group whose digest differs reads the lines of another group.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from keepstep.group.quorum_plan import WorldSizeMode
from keepstep_mesh.protocol.job_settings import differ, difference, settings_text

ARITHMETIC = 4
"""Version of the arithmetic of a step.

Increase it with every change after which a step computes other numbers from the same inputs: divisions and their order,
the precision or order of a reduction, the choice of averaged buffers, the encoding of values or of a state. Groups
of different versions then refuse to train together instead of drifting apart.
"""


def group_settings(
    *,
    use_async_quorum: bool,
    world_size_mode: WorldSizeMode,
    min_replica_size: int,
    init_sync: bool,
    refuse_nonfinite: bool,
    durable_every: int = 0,
    retry_allreduce: bool = False,
    spares: int = 0,
    process_group: Mapping[str, str] | None = None,
) -> str:
    """Return the settings that decide the arithmetic, as groups compare them.

    Add new settings here. Leave one out at the value that stands for what the release before does: groups of both
    releases then train together.

    ``spares``: number of groups that stand by, which decides how many train.
    ``process_group``: those without which the process groups do not connect.
    """
    places = f" of {min_replica_size}" if world_size_mode is WorldSizeMode.FIXED_WITH_SPARES else ""
    return settings_text(
        {
            "arithmetic": ARITHMETIC,
            "use_async_quorum": use_async_quorum,
            "world_size_mode": f"{world_size_mode.name}{places}",
            "init_sync": init_sync,
            "refuse_nonfinite": refuse_nonfinite,
            **({"durable_every": durable_every} if durable_every else {}),
            **({"retry_allreduce": True} if retry_allreduce else {}),
            **({"KEEPSTEP_SPARES": spares} if spares else {}),
            **(process_group or {}),
        }
    )


def layout_digest(settings: str, lines: list[str]) -> str:
    """Return the digest of settings and layout lines, which all groups must have in common; empty for no lines.

    The settings are included because an older lighthouse or group compares only the digest.
    """
    return hashlib.blake2b("\n".join([settings, *lines]).encode(), digest_size=16).hexdigest() if lines else ""


def first_difference(settings: str, lines: list[str], their_settings: str, their_lines: list[str], peer: str) -> str:
    """Describe the first difference between this group and ``peer`` in a sentence."""
    if differ(settings, their_settings):
        return difference(settings, "here", their_settings, peer)
    for number, (mine, other) in enumerate(zip(lines, their_lines, strict=False)):
        if mine != other:
            return f"first difference, entry {number}: here {mine!r}, in {peer} {other!r}"
    if len(lines) != len(their_lines):
        longer, where = (lines, "here") if len(lines) > len(their_lines) else (their_lines, f"in {peer}")
        return f"first difference: only {where}: {longer[min(len(lines), len(their_lines))]!r}"
    if settings != their_settings:
        return f"the parameters are equal, but {peer} runs another version of keepstep; run one version in all groups"
    return (
        "rank 0's parameters are equal, and those of another rank differ; use the same number of ranks, in the same "
        "order on the device mesh, in all groups"
    )
