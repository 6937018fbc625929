"""What all groups of a job must have in common: the settings that decide the arithmetic, and the parameters.

Settings travel as text: the lighthouse compares them from the first request on, and names what differs. Parameters, one
line each, are known once a model is wrapped; of them a digest travels, and a peer is asked for the lines.
"""

from __future__ import annotations

import hashlib

from keepstep.group.quorum_plan import WorldSizeMode
from keepstep_mesh.protocol.job_settings import differ, difference, settings_text

ARITHMETIC = 1
"""Version of what the groups of a job compute together.

Raise it with every change after which a step gives other numbers for the same inputs: what is divided by what and when,
the precision or order of a reduction, which buffers are averaged, how a state is encoded for a reduction. Groups of
different versions then refuse to train together instead of drifting apart.
"""


def group_settings(
    *, use_async_quorum: bool, world_size_mode: WorldSizeMode, min_replica_size: int, init_sync: bool
) -> str:
    """Return the settings that decide the arithmetic, as groups compare them. A new setting is one more entry here."""
    spares = f" of {min_replica_size}" if world_size_mode is WorldSizeMode.FIXED_WITH_SPARES else ""
    return settings_text(
        {
            "arithmetic": ARITHMETIC,
            "use_async_quorum": use_async_quorum,
            "world_size_mode": f"{world_size_mode.name}{spares}",
            "init_sync": init_sync,
        }
    )


def layout_digest(settings: str, lines: list[str]) -> str:
    """What groups compare to see that their parameters fit; empty for no lines.

    The settings are in it for an older lighthouse or peer, which compares nothing else.
    """
    return hashlib.blake2b("\n".join([settings, *lines]).encode(), digest_size=16).hexdigest() if lines else ""


def first_difference(settings: str, lines: list[str], their_settings: str, their_lines: list[str], peer: str) -> str:
    """Where two groups differ, in a sentence."""
    if differ(settings, their_settings):
        return difference(settings, "here", their_settings, peer)
    for number, (mine, other) in enumerate(zip(lines, their_lines, strict=False)):
        if mine != other:
            return f"first difference, entry {number}: here {mine!r}, in {peer} {other!r}"
    if len(lines) != len(their_lines):
        longer, where = (lines, "here") if len(lines) > len(their_lines) else (their_lines, f"in {peer}")
        return f"first difference: only {where}: {longer[min(len(lines), len(their_lines))]!r}"
    if settings != their_settings:
        return f"the parameters are alike, but {peer} runs another version of keepstep; run one version in all groups"
    return "rank 0's parameters are alike; those of another rank differ"
