"""Reasons why a quorum forms or not: a code, its numbers, and a sentence for operators.

The REST API, logs, denials and tests all show the same reason.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from keepstep_lighthouse.quorum.events import Reason
from keepstep_lighthouse.quorum.forming.quorum_rules import (
    Verdict,
    candidate_count,
    full_count,
    initial_count,
    least_candidates,
)
from keepstep_lighthouse.quorum.groups.group import WORKING, Exclusion, Group
from keepstep_lighthouse.quorum.groups.groups import Groups
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.lineage import is_following
from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.messages import ShardReport
from keepstep_mesh.text import listed

MAX_NAMED = 5
MIB = 1024 * 1024


def named(replica_ids: Iterable[str]) -> str:
    """``r0, r1 and 7 more``."""
    return listed(replica_ids, MAX_NAMED)


def waiting(
    verdict: Verdict, groups: Groups, record: JobRecord, absent: Iterable[str], now: float, lost: Iterable[str] = ()
) -> Reason:
    """Return why the next quorum is not formed yet.

    Args:
        absent: members that have not reconnected after a takeover.
        lost: names of groups that were lost and may return before the job finishes.
    """
    policy = record.policy
    asking, healthy, members = groups.asking_count, groups.counted, len(record.members)
    left = None if verdict.until is None else max(0.0, verdict.until - now)
    numbers: dict[str, float] = {"asking": asking, "healthy": healthy, "members": members}
    if left is not None:
        numbers["seconds_left"] = left
    silent = [g for g in groups if g.excluded is None and g.state is WORKING]
    match verdict.code:
        case "takeover_grace":
            missing = sorted(absent)
            numbers["absent"] = len(missing)
            waits = "does not know the members yet"
            if missing:
                waits = f"waits for {len(missing)} of {members} members to reconnect: {named(missing)}"
            sentence = f"the lighthouse has just taken over and {waits}; {left or 0:.1f} s of takeover_grace left"
        case "min_replicas":
            candidates = candidate_count(groups, members, policy)
            least = least_candidates(groups, policy)
            numbers |= {"candidates": candidates, "min_replicas": policy.min_replicas}
            sentence = f"{candidates} of at least {least} groups have asked for a quorum"
            if asking and not candidates:
                sentence = f"{asking} of {healthy} groups have asked for a quorum; {_mesh(groups)}"
            elif least > max(1, policy.min_replicas):
                sentence += f" (min_groups {least} of the training script)"
            if groups.shrinking and members:
                sentence += ", not counting joiners because a group asked with shrink_only"
        case "initial_replicas":
            wanted = initial_count(groups, policy)
            numbers["initial_replicas"] = wanted
            sentence = f"{asking} of the {wanted} groups for the first quorum have asked, {left or 0:.1f} s left"
        case "majority":
            numbers["healing"] = len(groups.heals.groups)
            sentence = f"{asking} of {healthy} healthy groups have asked, more than half must; {_not_asking(silent)}"
        case "stragglers":
            sentence = f"waiting for {len(silent)} of {healthy} groups: {_not_asking(silent)}"
            sentence += "" if left is None else f", {left:.1f} s of join_timeout left"
        case "grace":
            sentence = f"{asking} of {healthy} groups are ready; the others have {left or 0:.1f} s of grace left"
        case "healing":
            healing = sorted(g.replica_id for g in groups.heals.groups.values() if not g.heal_given_up)
            numbers["healing"] = len(healing)
            sentence = f"waiting for {len(healing)} of {healthy} groups: {'; '.join(_progress(groups, healing))}"
            sentence += "" if left is None else f", {left:.1f} s of heal_timeout left"
        case "shards":
            here = {g.replica_id for g in groups if g.excluded is None and g.request is not None}
            needed = list(groups.sources.lost_without(here, groups.by_id if left is None else groups.sources.unheard))
            sentence = f"the groups that have asked do not have all shards of the model; waiting for {named(needed)}"
            sentence += "" if left is None else f", {left:.1f} s of join_timeout left"
            if not needed:
                sentence = f"{_mesh(groups)}; none of the {asking} that have asked can be left out without its shards"
        case "finish_grace":
            sentence = f"waiting for the return of {named(sorted(lost))}, {left or 0:.1f} s of finish_grace left"
        case _:
            sentence = f"no group has asked for a quorum; {healthy} healthy"
    if groups.final:
        numbers["final"] = groups.final
        sentence = f"{groups.final} of {healthy} groups have finished; {sentence}"
    return Reason(verdict.code, numbers, sentence)


def too_late(reason: Reason) -> str:
    """Return the sentence of ``reason`` for a request whose time ends first, with the setting to change, if any."""
    limit = {"stragglers": "join_timeout", "healing": "heal_timeout"}.get(reason.code)
    if limit is None:
        return reason.sentence
    return f"{reason.sentence}, but none of the request's quorum_timeout: set quorum_timeout above {limit}"


def _not_asking(silent: list[Group]) -> str:
    away = sorted(g.replica_id for g in silent if g.session is None)
    there = sorted(g.replica_id for g in silent if g.session is not None)
    parts = []
    if there:
        parts.append(
            f"{named(there)} {'is connected but has' if len(there) == 1 else 'are connected but have'} not asked"
        )
    if away:
        parts.append(
            f"{named(away)} lost {'its connection' if len(away) == 1 else 'their connections'} and may reconnect"
        )
    return "; ".join(parts) if parts else "the others are healing"


def _progress(groups: Groups, healing: list[str]) -> Iterable[str]:
    for replica_id in healing[:MAX_NAMED]:
        heal = groups.heals.groups[replica_id].heal
        progress = None if heal is None else heal.progress
        if progress is None or not progress.bytes_total:
            yield f"{replica_id} is healing"
        else:
            yield (
                f"{replica_id} is healing, {progress.bytes_done / MIB:.0f} of {progress.bytes_total / MIB:.0f} MiB "
                f"at {progress.bytes_per_second / MIB:.0f} MiB/s"
            )
    if len(healing) > MAX_NAMED:
        yield f"{len(healing) - MAX_NAMED} more"


def closed(final: FinalState) -> Reason:
    """Return why no quorum of a closed job forms."""
    numbers: dict[str, float] = {"step": final.step, "groups": final.groups}
    groups = f"{final.groups} group{'' if final.groups == 1 else 's'}"
    return Reason("closed", numbers, f"the job is closed: {groups} finished together at step {final.step}")


class Formed(NamedTuple):
    """Facts about a quorum that has formed; most rounds need no sentence about them."""

    code: str
    quorum_id: int
    members: int
    left_out: list[str]
    """Healthy groups that are not in it."""
    forbid_heal: list[str]
    """Members that asked for a round without healing."""
    spares: list[str]
    """Groups that stand by."""
    parted: list[str]
    """Why groups are parted, one sentence each."""
    refused: str
    """Why groups are not parted although the evidence accuses them; empty: no such group."""
    retried: list[str]
    """Members that retry their last step."""

    @property
    def reason(self) -> Reason:
        """How the quorum was formed."""
        how = {
            "fast": "all members of the previous quorum asked",
            "all_asking": "all healthy groups asked",
            "stragglers_dropped": f"the wait for {named(self.left_out)} timed out",
        }[self.code]
        members = f"{self.members} member{'' if self.members == 1 else 's'}"
        numbers: dict[str, float] = {"quorum_id": self.quorum_id, "members": self.members}
        numbers["left_out"] = len(self.left_out)
        if self.forbid_heal:
            how += f"; no group heals because {named(self.forbid_heal)} asked for a round without healing"
        if self.spares:
            numbers["spares"] = len(self.spares)
            how += f"; standing by: {named(self.spares)}"
        if self.parted:
            numbers["parted"] = len(self.parted)
            how += f"; parted: {listed(self.parted, MAX_NAMED)}"
        if self.refused:
            how += f"; {self.refused}"
        if self.retried:
            how += f"; {named(self.retried)} retry the step with the gradients that they have"
        return Reason(self.code, numbers, f"quorum {self.quorum_id}, {members}: {how}")


def catching_up(group: Group) -> Reason | None:
    """Return that this group takes part without weights; None: it has its own."""
    if not is_following(group.lineage):
        return None
    why = f"{group.replica_id} catches up: it takes part without weights and does not count in the average"
    return Reason("catching_up", {}, why)


def of_group(group: Group, groups: Groups, record: JobRecord, now: float) -> Reason | None:
    """Return why this group would not be in the next quorum although it is healthy; None: it would be."""
    policy = record.policy
    numbers: dict[str, float]
    if group.is_excluded(Exclusion.DUPLICATE_NAME):
        older = groups.namesake(group).replica_id
        return Reason(
            "duplicate_name",
            {},
            f"{group.replica_id} waits: {older} has the same name and is healthy; "
            "a second `keepstep run` of one job needs --first-replica N",
        )
    if group.is_excluded(Exclusion.SPARE):
        wanted = full_count(groups, policy)
        numbers = {"groups": groups.counted, "target": wanted}
        why = f"{group.replica_id} stands by as a spare: the job has {groups.counted} of {wanted} groups"
        return Reason("spare", numbers, why)
    if group.excluded is not None:
        why = group.excluded.sentence
        if group.is_excluded(Exclusion.PARTED):
            left = max(0.0, group.excluded.until - now)
            why = f"{group.replica_id} is parted from the other groups for {left:.1f} s more: {why}"
            return Reason("parted", {"seconds_left": left}, why)
        return Reason("layout", {}, why)
    if (order := next((one for one in record.replacing if one.replica_id == group.replica_id), None)) is not None:
        why = f"{group.replica_id} trains until a spare has taken its place, as {order.by} ordered: {order.reason}"
        return Reason("replacing", {}, why)
    if group.member or group.request is None:
        return None
    if groups.shrinking and record.members:
        why = f"{group.replica_id} waits: a group asked with shrink_only, and it is not a member"
        return Reason("not_in_shrink", {}, why)
    if policy.max_replicas and len(record.members) >= policy.max_replicas:
        numbers = {"max_replicas": policy.max_replicas}
        why = f"{group.replica_id} waits: max_replicas {policy.max_replicas} is reached"
        return Reason("max_replicas", numbers, why)
    if candidate_count(groups, len(record.members), policy) < groups.asking_count:
        numbers = {"multiple": groups.multiple}
        return Reason("multiple", numbers, f"{group.replica_id} waits: {_mesh(groups)}")
    return None


def _mesh(groups: Groups) -> str:
    return f"the mesh of the training script needs a multiple of {groups.multiple} groups"


def no_copies(told: ShardReport) -> str:
    """Return why a member has no copies of its shards at a keeper."""
    return "; ".join(
        f"its keeper {hole.keeper} has no copies: {hole.reason}" if hole.keeper else hole.reason
        for hole in told.exposed
    )


def exposed(group: Group) -> str:
    """Return that a member has no copies of its shards at a keeper; empty: it has."""
    if group.shards is None or not group.shards.exposed:
        return ""
    return f"{group.replica_id} is exposed: {no_copies(group.shards)}"
