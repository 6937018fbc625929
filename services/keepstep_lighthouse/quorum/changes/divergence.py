"""Apply the policy to groups whose weights differ: heal, drain, or only report. Pure."""

from __future__ import annotations

from keepstep_lighthouse.quorum.changes import orders
from keepstep_lighthouse.quorum.events import DrainOrdered
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.rules.verification import Comparison
from keepstep_mesh.protocol.lineage import is_torn
from keepstep_mesh.protocol.membership import Data


def mark(state: JobState, comparison: Comparison) -> None:
    """Mark the groups that differ, so that they heal in the coming quorum, unless the policy only reports."""
    if state.record.policy.on_divergence == "report":
        return
    for replica_id in comparison.diverged:
        group = state.groups.by_id[replica_id]
        group.diverged = not is_torn(group.lineage)


def tell(state: JobState, comparison: Comparison) -> None:
    """Log the comparison, and drain the groups that differ if the policy says so."""
    action = state.record.policy.on_divergence
    roots, diverged = comparison.roots, comparison.diverged
    facts: dict[str, Data] = {"step": comparison.step, "groups": sum(map(len, roots.values()))}
    facts |= {"missing": comparison.missing, "order": comparison.order}
    if len(roots) == 1:
        if comparison.order:
            facts["roots"] = roots  # only for an order: with verify_every, the names of all groups would fill the log
        state.log("replicas_verified", "", **facts)
        return
    for replica_id in diverged:
        state.log("replica_diverged", replica_id, step=comparison.step, action=action)
        if action == "drain":
            orders.drain(state, DrainOrdered(replica_id, "its weights differ from those of others", by="on_divergence"))
    what = action if diverged else "nothing: no state has a majority, so it is unknown which one is right"
    state.log("replicas_differ", "", **facts, roots=roots, diverged=diverged, action=what)
