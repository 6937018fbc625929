"""Steps that groups take again after the loss of a member, with the gradients that they have. Pure.

A group whose all-reduces failed may ask with ``retry`` for a quorum of the same step. Rules:

* Such a request is also ``shrink_only``: the members that are left take the step among themselves. A joiner waits for
  the next one, and they do not wait for a joiner.
* If too few members are left for a quorum, the request is denied, so that joiners complete it.
* The gradients of a group are those of its state. If another member holds a newer state, because it had committed the
  step before the loss, the request is denied. The group then discards the step, asks again, and heals. A group that
  follows the others contributes zeros, and retries with them.
* A group that is parted (``probation``) is denied too: the others take the step without it.
* A member that does not retry may take part: it asks for the same step, and computes it again.
"""

from __future__ import annotations

from collections.abc import Callable

from keepstep_lighthouse.quorum.forming.announcing import members_of
from keepstep_lighthouse.quorum.forming.quorum_rules import ANNOUNCING, Code, Verdict, choose
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.lineage import following, reference_state

WAITS_FOR_OTHERS: frozenset[Code] = frozenset(("stragglers", "healing"))
"""Verdicts that wait for groups that do not ask yet."""


def settle(job: JobState, verdict: Verdict, judge_again: Callable[[], Verdict]) -> Verdict:
    """Decide about open requests with ``retry``.

    Args:
        verdict: on the open requests.
        judge_again: returns the verdict after a request was denied.

    Returns:
        The verdict that replaces it.
    """
    waits = any(map(_may_still_ask, job.groups))
    if waits and verdict.code not in ANNOUNCING:  # after most requests
        return verdict
    retrying = [group for group in job.groups.all_asking() if group.member and _retries(group)]
    if not retrying:
        return verdict
    if not waits:
        if verdict.code == "min_replicas":
            for group in retrying:
                _deny(job, group, f"{group.name} cannot retry its step: too few members of its quorum are left")
            return judge_again()
        if verdict.code in WAITS_FOR_OTHERS:
            verdict = Verdict("fast")
    if verdict.code in ANNOUNCING and _deny_late(job):
        return judge_again()
    return verdict


def _may_still_ask(group: Group) -> bool:
    return group.member and group.excluded is None and group.request is None


def _deny_late(job: JobState) -> bool:
    """Deny retries of a step that another group has committed, before a quorum forms. Return whether any was denied."""
    chosen = choose(job.groups, job.record)
    members = members_of(chosen)
    step, lineage = reference_state(members)
    heals = all(group.request is None or group.request.allow_heal for group in chosen)  # else none follows
    lineages = {lineage, following(lineage)} if heals else {lineage}
    fits = [one.step == step and one.lineage in lineages for one in members]
    late = [group for group, fit in zip(chosen, fits, strict=True) if _retries(group) and not fit]
    held = [(one.step, one.lineage) == (step, lineage) for one in members]
    newest = named(group.name for group, holds in zip(chosen, held, strict=True) if holds)
    for group in late:
        _deny(job, group, f"{group.name} cannot retry the step after step {group.step}: {newest} committed it")
    return bool(late)


def deny_parted(job: JobState, group: Group) -> None:
    """Deny the retry of a group that is kept out. Else its open request would keep joiners out, once it is let in."""
    if _retries(group):
        _deny(job, group, f"{group.name} cannot retry its step: it is parted from the other groups")


def note(job: JobState, chosen: list[Group]) -> list[str]:
    """Log which members of the quorum that forms retry their step, and return them."""
    if not job.groups.shrinking:
        return []
    retried = [group.replica_id for group in chosen if _retries(group)]
    if retried:
        step = max(group.step for group in chosen if _retries(group))
        job.log("step_retried", "", step=step + 1, groups=retried, quorum_id=job.record.quorum_id)
    return retried


def _retries(group: Group) -> bool:
    return group.request is not None and group.request.retry


def _deny(job: JobState, group: Group, reason: str) -> None:
    job.groups.tally.discarded += 1  # its next request follows no answer
    job.deny(group, "retry", reason)
