"""Rules that form a quorum, as arithmetic on counts. In their order:

    0 takeover   after a takeover, members of the stored quorum are absent       -> wait for their grace
    1 fast       every member of the previous quorum is asking                   -> announce
    2 minimum    fewer candidates than min_replicas, or none                     -> wait (rule 1 too)
      initial    first quorum of the job, or the next one after the loss of all members with refuse_going_back:
                 fewer than initial_replicas are asking, and neither join_timeout nor half of the requests' time
                 limit is over                                                   -> wait
    3 majority   no more than half of the healthy groups are asking              -> wait
    4 stragglers a healthy group is not asking, join_timeout is not over         -> wait
      healing    only healing groups are not asking, heal_timeout is not over    -> wait
    5            otherwise                                                       -> announce

Groups that train while they ask (``QuorumRequest.min_groups``) replace ``join_timeout`` and the majority: when
``min_groups`` ask, the others have ``grace_ms`` to come. One of those that ask must be a member of the previous quorum
whose last step did not fail, and which was not behind in it. It holds the newest state, so that no two quorums go on
from the same state. Without such a member, rules 3 and 4 hold.

Groups that have finished (``QuorumRequest.final``) wait for all others: rule 1, ``min_groups`` and ``min_replicas`` do
not apply while one of them asks, because no step follows. ``finishing`` decides about the quorum that is due.

After a takeover these waits begin again, but a request keeps its deadline. So the first quorum of a new leader waits
for no group beyond the first deadline of a request: a group that hangs would end the healthy ones.

Candidates are the asking groups; if one of them asks with shrink_only, only members of the previous quorum; never more
than max_replicas. Where a model exists once, their number fits its mesh (``QuorumRequest.multiple``), and a group stays
that alone has a shard: ``shards`` has those rules. Groups that heal are known to be alive: they do not count in rule 3
and have a time limit of their own, which doubles with each heal of that name that exceeded it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.groups.groups import Groups
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.policy import Policy, heal_limit

Code = Literal[
    "fast",
    "all_asking",
    "stragglers_dropped",
    "nobody",
    "takeover_grace",
    "min_replicas",
    "initial_replicas",
    "majority",
    "stragglers",
    "grace",
    "healing",
    "finish_grace",
    "shards",
]
ANNOUNCING: frozenset[Code] = frozenset(("fast", "all_asking", "stragglers_dropped"))


class Verdict(NamedTuple):
    code: Code
    until: float | None = None
    """When time alone may change the verdict."""


NOBODY = Verdict("nobody")
FINISHING_HEALS = 3
"""Doublings of ``heal_timeout`` while groups finish: groups that heal too late come too late for ever."""
FAST = Verdict("fast")
TOO_FEW = Verdict("min_replicas")
NO_MAJORITY = Verdict("majority")


def judge(
    groups: Groups,
    record: JobRecord,
    grace_until: float | None,
    now: float,
    *,
    initial: bool = True,
    interrupted: bool = False,
) -> Verdict:
    """Return the verdict on the open requests. O(1), unless the quorum may have to wait as the first one.

    Args:
        grace_until: end of the takeover grace; None: no grace.
        initial: whether rule ``initial`` holds. It does not once a group was denied.
        interrupted: no quorum formed since a takeover.
    """
    asking, quorum_size, policy = groups.asking_count, len(record.members), record.policy
    if asking == 0:
        return NOBODY
    if grace_until is not None:
        return Verdict("takeover_grace", grace_until)
    if candidate_count(groups, quorum_size, policy) < least_candidates(groups, policy):
        return TOO_FEW
    if quorum_size and groups.members_asking == quorum_size and not groups.final:
        return FAST
    first_asked = groups.first_asked()
    if initial and first_asked is not None and _is_first(groups, record) and asking < initial_count(groups, policy):
        # Before the first of the open requests times out.
        latest = min(first_asked + policy.join_timeout, (first_asked + groups.next_request_deadline()) / 2)
        if now < latest:
            return Verdict("initial_replicas", latest)
    healing = len(groups.heals.groups)
    grace_ends = end_of_grace(groups)
    if grace_ends is not None:
        if groups.counted > asking + healing and now < grace_ends:
            return Verdict("grace", grace_ends)
    elif asking <= (groups.counted - healing) // 2:
        return NO_MAJORITY
    elif groups.counted > asking + healing:
        until = _end_of_wait(groups, policy.join_timeout, interrupted=interrupted)
        if until is None or now < until:
            return Verdict("stragglers", until)
    if groups.heals.waited_for:
        failed = max(groups.heals.waited_for) + (FINISHING_HEALS if groups.final else 0)
        limit = heal_limit(policy.heal_timeout, failed)
        until = _end_of_wait(groups, limit, interrupted=interrupted)
        if until is None or now < until:
            return Verdict("healing", until)
    return Verdict("all_asking" if asking == groups.counted else "stragglers_dropped")


def _is_first(groups: Groups, record: JobRecord) -> bool:
    """Return whether the next quorum waits for the groups as the first one of the job does."""
    if record.quorum_id == record.first_quorum_id:
        return True
    return record.policy.refuse_going_back and not any(group.member for group in groups)


def _end_of_wait(groups: Groups, limit: float, *, interrupted: bool) -> float | None:
    first_asked = groups.first_asked()
    if first_asked is None:
        return None
    return min(first_asked + limit, groups.next_request_deadline()) if interrupted else first_asked + limit


def least_candidates(groups: Groups, policy: Policy) -> int:
    """Return the number of candidates that a quorum needs: what the policy and the groups that ask require."""
    return 1 if groups.final else max(1, policy.min_replicas, min_groups(groups))


def min_groups(groups: Groups) -> int:
    """Return ``QuorumRequest.min_groups`` of the first group that asks; it is equal in all groups of a job."""
    for first in (groups.asking or groups.passed_over).values():
        return first.request.min_groups if first.request is not None else 0
    return 0


def end_of_grace(groups: Groups) -> float | None:
    """Return until when groups that train while they ask wait for others; None: they ask as all groups do.

    O(1) for groups that wait, else O(asking groups).
    """
    least = min_groups(groups)
    if not least or groups.final:
        return None
    asking = [*groups.passed_over.values(), *groups.asking.values()]
    if not any(map(_asks_with_newest, asking)):
        return None
    last_needed = sorted(asking, key=lambda one: one.asked_at)[least - 1]
    return last_needed.asked_at + max(one.request.grace_ms for one in asking if one.request is not None) / 1000


def _asks_with_newest(group: Group) -> bool:
    """Return whether the group asks with the state of the job; after a takeover, whether it may."""
    request = group.request
    if not group.member or request is None or request.commit_failures:
        return False
    return group.answer is None or group.holds_newest()


def initial_count(groups: Groups, policy: Policy) -> int:
    """Return the number of groups that the first quorum of a job waits for."""
    wanted = policy.initial_replicas or groups.expected
    return min(wanted, policy.max_replicas or wanted)


def full_count(groups: Groups, policy: Policy) -> int:
    """Return the number of groups that train when none is missing: as the groups tell, within the policy."""
    wanted = max(groups.expected or policy.initial_replicas, policy.min_replicas)
    return min(wanted, policy.max_replicas or wanted)


def candidate_count(groups: Groups, quorum_size: int, policy: Policy) -> int:
    count = groups.members_asking if groups.shrinking and quorum_size else groups.asking_count
    count = min(count, policy.max_replicas) if policy.max_replicas else count
    return count if groups.multiple <= 1 else count - surplus(count, groups)


def surplus(count: int, groups: Groups) -> int:
    """Return how many of ``count`` groups do not fit the mesh. Groups that finish take no step, and all fit."""
    return count % groups.multiple if groups.multiple > 1 and not groups.final else 0


def choose(groups: Groups, record: JobRecord) -> list[Group]:
    """Return the candidates, sorted by replica_id. If some are too many, members of the previous quorum come first."""
    chosen, policy = groups.all_asking(), record.policy
    if groups.shrinking and record.members:
        chosen = [group for group in chosen if group.member]
    too_many = len(chosen) - candidate_count(groups, len(record.members), policy)
    if not too_many:
        return chosen
    kept = {group.replica_id for group in chosen}
    for group in sorted(chosen, key=lambda group: (not group.member, group.replica_id), reverse=True):
        if too_many and not groups.sources.needs(group.replica_id, kept):
            kept.remove(group.replica_id)
            too_many -= 1
    return [group for group in chosen if group.replica_id in kept]
