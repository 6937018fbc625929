"""All groups of a job train the same parameters: whose layout does a group have to fit?"""

from __future__ import annotations

from keepstep_lighthouse.groups import Group, Groups, KeptOut


def differing(groups: Groups, group: Group) -> list[Group]:
    """The healthy groups with another layout than ``group``: members of the quorum first, then who came first."""
    layout = group.info.layout
    others = [
        other for other in groups if other.info.layout not in ("", layout) and other.kept_out is not KeptOut.LAYOUT
    ]
    return sorted(others, key=lambda other: (not other.member, other.arrived))
