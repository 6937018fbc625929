"""Consequences for groups whose weights differ from those of others. Pure.

* **While the groups train**, the policy decides: a group that differs from the majority heals, is drained, or goes on.
  Without a majority the right weights are unknown, and nothing follows. All members learn what was found.
* **Again.** A group that differs again after it had to heal is refused: its script changes the weights in another way
  than those of the others, or loads less than the whole state, or its memory fails. Else it would heal for ever. The
  record of the job says which groups had to heal, so that a lighthouse that takes over knows it.
* **Where groups finish**, no group ends with other weights than the majority and without an error: it heals if the
  policy says so, once, else it is refused. Without a majority all groups are refused, and the job is not closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from keepstep_lighthouse.quorum.groups.group import Excluded, Exclusion, Group
from keepstep_lighthouse.quorum.job_record import WEIGHTS, Divergence
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.verification.comparisons import Comparison
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.lineage import is_torn
from keepstep_mesh.protocol.membership import Data, FinalState
from keepstep_mesh.protocol.messages import Denied, QuorumRequest
from keepstep_mesh.protocol.names import name_of

ACTIONS = {"heal": "heal", "drain": "drain", "report": "none, because on_divergence is report"}
"""Action for a group that differs, by ``Policy.on_divergence``."""


def note(job: JobState, group: Group, what: str, quorum_id: int, step: int) -> None:
    """Persist that the group has to heal, unless it had to before. Parameters are those of ``Divergence``."""
    if first_difference(job, group, what) is None:
        diverged = *job.record.diverged, Divergence(group.replica_id, what, quorum_id, step)
        job.persist(replace(job.record, diverged=diverged))


def first_difference(job: JobState, group: Group, what: str) -> Divergence | None:
    """Return why the group had to heal first; None: it never had to."""
    of_group = (one for one in job.record.diverged if (one.replica_id, one.what) == (group.replica_id, what))
    return next(of_group, None)


def refuse_repeated(job: JobState, comparison: Comparison) -> bool:
    """Refuse the groups that differ again. Return whether any was refused."""
    if job.record.policy.on_divergence != "heal":
        return False
    refused = False
    for group in _diverged(job, comparison):
        first = first_difference(job, group, WEIGHTS)
        # the lighthouse before this one may have found this very difference, and died before it answered
        same = first is not None and first.step == comparison.step and group.answer is None
        if first is None or same or group.diverged:
            continue
        why = (
            f"{_differs(comparison, [group.name])} again: it had to heal because they differed at step "
            f"{first.step}, so its script changes them in another way than the script of the others, or does "
            f"not register or load all of the state, or its memory fails; make script and settings equal in all "
            f"groups, then start it again"
        )
        refused = _refuse(job, comparison, [group], why) or refused
    return refused


def refuse_at_end(job: JobState, comparison: Comparison, chosen: Sequence[Group]) -> bool:
    """Refuse groups that cannot finish with other weights than the others. Return whether any was refused."""
    if len(comparison.roots) == 1:
        return False
    if comparison.right is None:
        sides = " against ".join(named(map(name_of, groups)) for groups in comparison.roots.values())
        why = (
            f"the groups have finished step {comparison.step} with different weights ({sides}), and no majority tells "
            f"which are right, so none of them finishes; load a checkpoint from before the difference: the events "
            f"replicas_verified and replicas_differ have the steps that were compared; make script and settings equal "
            f"in all groups, then start them again"
        )
        compared = {one for groups in comparison.roots.values() for one in groups}
        return _refuse(job, comparison, [group for group in chosen if group.replica_id in compared], why)
    if job.record.policy.on_divergence == "heal":
        return False
    action = job.record.policy.on_divergence
    why = (
        f"{_differs(comparison, map(name_of, comparison.diverged))}, and on_divergence is {action}; with heal ("
        f"keepstep policy --on-divergence heal) such groups take over the weights of the others"
    )
    return _refuse(job, comparison, _diverged(job, comparison), why)


def refuse_after_end(job: JobState, group: Group, request: QuorumRequest, final: FinalState) -> None:
    """Deny the request of a group that finishes with other weights than those at which the job was closed."""
    why = (
        f"the groups of the job finished at step {final.step}, and this group came there later with other weights; "
        f"use the final state of another group, and make script and settings equal in all groups"
    )
    job.log("replica_diverged", group.replica_id, step=final.step, action="refuse")
    if group.session is not None:
        job.tell(group.session, Denied(request.request, "diverged", why))
        job.log("denied", group.replica_id, code="diverged", reason=why)


def mark(job: JobState, comparison: Comparison) -> None:
    """Mark the groups that differ, so that they heal in the coming quorum, unless the policy only reports."""
    action = job.record.policy.on_divergence
    for replica_id in comparison.roots[comparison.right] if comparison.right is not None else ():
        group = job.groups.by_id[replica_id]
        if group.step == comparison.step:  # else it is marked for what it did after that step
            group.diverged = False  # also if the report of its heal was lost
    if action == "report":
        return
    for group in _diverged(job, comparison):
        group.diverged = not is_torn(group.lineage)
        if group.diverged and action == "heal":
            note(job, group, WEIGHTS, job.record.quorum_id, comparison.step)


def sentence(job: JobState, comparison: Comparison, *, refused: bool = False) -> str:
    """Return what the members learn of a comparison; empty: all weights are equal.

    Args:
        refused: the groups that differ were refused.
    """
    if len(comparison.roots) == 1:
        return ""
    if comparison.right is None:
        sides = " against ".join(named(map(name_of, groups)) for groups in comparison.roots.values())
        return (
            f"the weights of the groups differ after step {comparison.step} ({sides}), and no majority tells which are "
            f"right, so no group heals"
        )
    action = "refuse, because they differ again" if refused else ACTIONS[job.record.policy.on_divergence]
    return f"{_differs(comparison, map(name_of, comparison.diverged))}; action: {action}"


def tell(job: JobState, comparison: Comparison) -> None:
    """Log the comparison, and drain the groups that differ if the policy says so."""
    action = job.record.policy.on_divergence
    if len(comparison.roots) == 1:
        facts = _facts(comparison)
        if comparison.order:
            facts["roots"] = comparison.roots  # only for an order: with verify_every, all names would fill the log
        job.log("replicas_verified", "", **facts)
        return
    for replica_id in comparison.diverged:
        job.log("replica_diverged", replica_id, step=comparison.step, action=action)
        if action == "drain":
            job.drain(replica_id, "its weights differ from those of others", by="on_divergence")
    what = action if comparison.diverged else "nothing: no state has a majority, so it is unknown which one is right"
    _log_differ(job, comparison, what)


def _diverged(job: JobState, comparison: Comparison) -> list[Group]:
    return [job.groups.by_id[replica_id] for replica_id in comparison.diverged]


def _differs(comparison: Comparison, names: Sequence[str] | map[str]) -> str:
    others = named(map(name_of, comparison.roots[comparison.right or ""]))
    return f"the weights of {named(names)} differ from those of {others} after step {comparison.step}"


def _facts(comparison: Comparison) -> dict[str, Data]:
    groups = sum(map(len, comparison.roots.values()))
    return {"step": comparison.step, "groups": groups, "missing": comparison.missing, "order": comparison.order}


def _log_differ(job: JobState, comparison: Comparison, action: str) -> None:
    facts = {"roots": comparison.roots, "diverged": comparison.diverged, "action": action}
    job.log("replicas_differ", "", **_facts(comparison), **facts)


def _refuse(job: JobState, comparison: Comparison, groups: Sequence[Group], why: str) -> bool:
    """Deny the requests of groups, and wait for them no longer. Return whether any was denied."""
    for group in groups:
        if group.replica_id in comparison.diverged:
            job.log("replica_diverged", group.replica_id, step=comparison.step, action="refuse")
        job.deny(group, "diverged", why)
        job.groups.exclude(group, Excluded(Exclusion.LAYOUT, why))
    if groups:
        _log_differ(job, comparison, "refuse")
    return bool(groups)
