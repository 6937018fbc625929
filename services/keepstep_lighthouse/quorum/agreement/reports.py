"""React to the reports of groups about their last steps. Pure.

Groups that begin different numbers of collectives in each step can never commit a step together, nor can groups of
which only some quantize. The smaller side ends after the second step in a row, because the script of one group is more
likely to be wrong than those of all others. Both sides end if they are equally large.

A group whose optimizers stepped with other values than those of the others has other weights. It heals, because a
single such step can come from a script that joins; after the second one it is refused.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep_lighthouse.quorum import orders
from keepstep_lighthouse.quorum.agreement import agreements
from keepstep_lighthouse.quorum.agreement.step_reports import Mismatch, Mixture
from keepstep_lighthouse.quorum.events import DrainOrdered
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_record import VALUES
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.verification import divergence
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.lineage import is_torn
from keepstep_mesh.protocol.membership import Data, StepReport
from keepstep_mesh.protocol.messages import Denied

MAX_DURABLE_RELAYS = 100


def note_durable_relays(state: JobState, relays: tuple[str, ...]) -> None:
    """Store which relays have the newest durable checkpoint, for a group that resumes after the loss of all."""
    relays = relays[:MAX_DURABLE_RELAYS]
    if relays != state.record.durable_relays:
        state.persist(replace(state.record, durable_relays=relays))


def note(state: JobState, group: Group, report: StepReport) -> None:
    """Note the report of a request. A request that is sent again has the report of the one before."""
    before = group.last_step
    if before is not None and before.step == report.step and before == report:
        return
    group.last_step = report
    state.reports.add(group.replica_id, report)
    if not report.nonfinite:
        return
    state.groups.tally.nonfinite += 1
    if state.reports.is_first_nonfinite(report) and not (before is not None and before.nonfinite):
        state.log("nonfinite", group.replica_id, step=report.step_after, committed=report.committed)


def end_minority(state: JobState) -> bool:
    """Deny the requests of groups whose collectives differed twice. Return whether any was denied."""
    if (mismatch := state.reports.take_mismatch()) is not None:
        return _end_by_number(state, mismatch)
    if (mixture := state.reports.take_mixture()) is not None:
        return _end_by_encoding(state, mixture)
    return False


def settle_values(state: JobState) -> bool:
    """Let groups heal whose optimizers stepped with other values, or refuse them. Return whether any was refused."""
    refused = False
    for key, completed in state.reports.take_other_values():
        sides: dict[str, list[Group]] = {}
        for group in state.groups.all_asking():
            report = group.last_step
            if report is not None and report.committed and report.values and (report.quorum_id, report.step) == key:
                sides.setdefault(report.values, []).append(group)
        if len(sides) > 1:
            sizes = completed.values
            right = max(sides, key=lambda side: (sizes[side], -min(one.arrived for one in sides[side])))
            others = sides.pop(right)
            wrong = [group for side in sides.values() for group in side]
            refused |= _settle_side(state, key, wrong, others)
    return refused


def _settle_side(state: JobState, key: tuple[int, int], wrong: list[Group], others: list[Group]) -> bool:
    action, step = state.record.policy.on_divergence, key[1]
    what = (
        f"the optimizers of {named(one.name for one in wrong)} stepped with other values than those of "
        f"{named(one.name for one in others)} in the step after step {step}"
    )
    again = [group for group in wrong if action == "heal" and _stepped_apart(state, group, key)]
    facts: dict[str, Data] = {"step": step, "groups": sorted(group.replica_id for group in wrong)}
    facts["refused"] = sorted(group.replica_id for group in again)
    state.log("values_differ", "", **facts, action=action, reason=what)
    for group in wrong:
        if group in again and group.request is not None:
            agreements.deny(state, group, group.request, f"{what}, again after a heal", others[0].info.address)
        elif action == "heal":
            group.diverged = not is_torn(group.lineage)
            divergence.note(state, group, VALUES, *key)
        elif action == "drain":
            orders.drain(state, DrainOrdered(group.replica_id, what, by="on_divergence"))
    return bool(again)


def _stepped_apart(state: JobState, group: Group, key: tuple[int, int]) -> bool:
    """Return whether the optimizers of the group stepped with other values in an earlier step than this one."""
    first = divergence.first_difference(state, group, VALUES)
    return first is not None and (first.quorum_id, first.step) != key


def _end_by_number(state: JobState, mismatch: Mismatch) -> bool:
    asking = state.groups.all_asking()
    fewer = [group for group in asking if _completed(group, mismatch)]
    more = [group for group in asking if group.replica_id in mismatch.began]
    lead = mismatch.completed.groups - len(mismatch.began)
    ends = _smaller(fewer, more, lead) if mismatch.repeated else []
    sentence = _sentence(mismatch)
    facts: dict[str, Data] = {
        "step": mismatch.step,
        "completed": mismatch.completed.collectives,
        "completed_by": [group.replica_id for group in fewer] or [mismatch.completed.first],
        "began": dict(mismatch.began),
        "ended": sorted(group.replica_id for group in ends),
    }
    state.log("collectives_differ", "", **facts, reason=sentence)
    return _end(state, ends, sentence)


def _end_by_encoding(state: JobState, mixture: Mixture) -> bool:
    asking = state.groups.all_asking()
    encoded = [group for group in asking if group.replica_id in mixture.encoded]
    plain = [group for group in asking if group.replica_id in mixture.plain]
    ends = _smaller(encoded, plain, len(mixture.encoded) - len(mixture.plain)) if mixture.repeated else []
    sentence = (
        f"not all groups quantize: in the step after step {mixture.step}, {named([*mixture.encoded])} sent encoded "
        f"values and {named([*mixture.plain])} did not; give should_quantize and the codec the same value in all groups"
    )
    facts: dict[str, Data] = {
        "step": mixture.step,
        "encoded": list(mixture.encoded),
        "plain": list(mixture.plain),
        "ended": sorted(group.replica_id for group in ends),
    }
    state.log("collectives_differ", "", **facts, reason=sentence)
    return _end(state, ends, sentence)


def _smaller(first: list[Group], second: list[Group], lead: int) -> list[Group]:
    """Return the smaller side; both if none of them leads. ``lead``: size of the first minus that of the second."""
    return (second if lead > 0 else first) if lead else [*first, *second]


def _end(state: JobState, ends: list[Group], sentence: str) -> bool:
    """Deny the requests of groups. Return whether any was denied."""
    for group in ends:
        if group.request is not None and group.session is not None:
            state.tell(group.session, Denied(group.request.request, "collectives", sentence))
        state.groups.withdraw(group)
    return bool(ends)


def _completed(group: Group, mismatch: Mismatch) -> bool:
    report = group.last_step
    key = mismatch.quorum_id, mismatch.step
    return report is not None and report.committed and (report.quorum_id, report.step) == key


def _sentence(mismatch: Mismatch) -> str:
    completed, began = mismatch.completed, mismatch.began
    others = f" and {completed.groups - 1} more" if completed.groups > 1 else ""
    return (
        f"the groups began different numbers of collectives in the step after step {mismatch.step}: "
        f"{completed.first}{others} completed it with {completed.collectives}, {named(sorted(began))} began "
        f"{max(began.values())}; call manager.allreduce equally often in all groups"
    )
