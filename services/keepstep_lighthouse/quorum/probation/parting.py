"""Part the groups that keep others from committing, and let them in again. Pure.

Before a quorum forms after a failed round, the evidence of its members is judged (``evidence``). The groups that
explain what is confirmed are parted (``parted``): they stay connected, and quorums form without them. Rules:

* A round that lost a member is not judged: the loss explains it.
* The fewest groups are parted. Of two that are accused equally often: not a member of the last quorum that committed,
  then the one that arrived later, then the one with the higher name.
* Quorums keep the number of groups that they need (``min_replicas``). Otherwise no group is parted, and the reason of
  the quorum says so. If the others become too few later, parted groups are let in.
* A heal that did not end in a commit counts too, from the second in a row on, unless another member failed by itself.
* A parted group is let in when its time is over, when no group is left that it could not reach, when the evidence
  accuses another group instead, or when an operator says so; one that is parted for its heals, also when the others
  finish. It is then on trial until it commits a step.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from keepstep_lighthouse.quorum import retries
from keepstep_lighthouse.quorum.forming.quorum_rules import least_candidates
from keepstep_lighthouse.quorum.groups.group import Excluded, Exclusion, Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.probation.evidence import Accusation, accusations, cover
from keepstep_lighthouse.quorum.probation.parted import Cause
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.membership import OWN
from keepstep_mesh.protocol.messages import QuorumRequest
from keepstep_mesh.protocol.names import name_of

Causes = dict[str, tuple[Cause, str]]
"""Why groups must be parted, by stable name: the cause, and a sentence."""

# ---- what groups report


def note(state: JobState, group: Group, request: QuorumRequest) -> None:
    """A group asks. Note why its last step failed, and whether its heal did."""
    if not group.member or not request.commit_failures:
        return
    failure = request.failure
    if failure is not None and failure.quorum_id == state.record.quorum_id:
        state.round.failures[group.name] = failure
    if group.heal is not None and not group.heal_given_up:
        told = group.heal.progress
        if told.error or not told.ended:
            state.round.failed_heals[group.name] = told.error or "it did not end"


def committed(state: JobState, group: Group) -> None:
    """The group committed a step: its probation ends."""
    probation, name = state.probation, group.name
    if (name in probation.failed_heals or name in probation.groups) and not probation.is_out(name):
        forgive(state, name, "it committed a step")


def lost_while_healing(state: JobState, group: Group, reason: str, now: float) -> None:
    """A member is lost. If it was healing, its heal failed."""
    if group.member and group.heal is not None and not group.heal_given_up and state.probation.heal_failed(group.name):
        _part(state, group.name, "heal", _failed_heals(state, group.name, reason), now)


# ---- before a quorum forms


def settle(state: JobState, now: float) -> bool:
    """Judge the round that ended, before the next quorum forms. Return whether other groups count now."""
    round_, probation = state.round, state.probation
    failed = bool(round_.failures or round_.failed_heals)
    if not failed:
        probation.refused = ""
        if not probation.groups:
            return False
    changed = _let_in_reunited(state)
    if failed and not round_.judged:
        round_.judged = True
        changed |= _judge(state, now)
    return changed


def _judge(state: JobState, now: float) -> bool:
    round_, groups, probation = state.round, state.groups, state.probation
    if round_.lost or any(group.member for group in groups.suspects.values()):
        return False
    duration = _duration(state, now)
    found = accusations(round_.failures, {name_of(one) for one in state.record.members})
    confirmed = state.evidence.add(found, round_.number, duration, now, probation.groups)
    out = {name for name, one in probation.groups.items() if one.out and one.cause == "cut" and name in groups.by_name}
    accused = {one for one in confirmed if all(name in groups.by_name for name in one)}
    accused = accused.union(*state.evidence.confirmed_against(out).values()) if accused else set()
    proven = {group.name for group in state.proven}
    chosen = cover(accused, lambda name: _suspicion(state, name, proven))
    causes = {name: _cause(state, name, accused) for name in sorted(chosen - out)} | _broken_heals(state)
    if _too_few_without(state, causes):
        return False
    for name in sorted(out - chosen) if accused else ():
        _let_in(state, name, f"the failures of {named(sorted(chosen))} explain why it was parted")
    for name, (cause, reason) in causes.items():
        _part(state, name, cause, reason, now)
    return bool(causes)


def _suspicion(state: JobState, name: str, proven: Container[str]) -> tuple[bool, int, str]:
    """Return what decides between groups that are accused equally often; the highest is parted."""
    arrived = max((group.arrived for group in state.groups.by_name.get(name, ())), default=0)
    return name not in proven, arrived, name


def _cause(state: JobState, name: str, accused: set[Accusation]) -> tuple[Cause, str]:
    failure = state.round.failures.get(name)
    if failure is not None and failure.cause == OWN and frozenset((name,)) in accused:
        return "own", f"{name} fails by itself: {failure.reason or 'it gave no reason'}"
    others = sorted({other for one in accused if name in one for other in one} - {name})
    if not others and failure is not None:
        others = sorted(map(name_of, failure.peers))
    return "cut", f"{name} and {named(others)} cannot reach each other"


def _broken_heals(state: JobState) -> Causes:
    """Count the heals that failed in this round. Return the groups to part for it."""
    round_, probation = state.round, state.probation
    causes: Causes = {}
    for name, error in sorted(round_.failed_heals.items()):
        if any(other != name and failure.cause == OWN for other, failure in round_.failures.items()):
            continue
        if probation.heal_failed(name) or name in probation.groups:
            causes[name] = "heal", _failed_heals(state, name, error)
    return causes


def _failed_heals(state: JobState, name: str, error: str) -> str:
    failed = state.probation.failed_heals.get(name, 0)
    return f"{failed} heal{'' if failed == 1 else 's'} of {name} failed in a row: {error}"


def _too_few_without(state: JobState, causes: Causes) -> bool:
    """Return whether a quorum needs some of these groups; note why they are not parted."""
    groups = state.groups
    stay = [one for one in groups.all_asking() if one.name not in causes and (one.member or not groups.shrinking)]
    least = least_candidates(groups, state.record.policy)
    state.probation.refused = ""
    if not causes or len(stay) >= least:
        return False
    why = "; ".join(sentence for _, sentence in causes.values())
    state.probation.refused = f"{why}; not parted, because {len(stay)} would be left and a quorum needs {least} groups"
    state.log("not_parted", "", groups=sorted(causes), left=len(stay), needed=least, reason=why)
    return True


def _part(state: JobState, name: str, cause: Cause, reason: str, now: float) -> None:
    parted = state.probation.part(name, cause, reason, _duration(state, now), now)
    for group in state.groups.by_name.get(name, ()):
        keep_out(state, group)
    facts = {"cause": cause, "seconds": round(parted.until - now, 1), "times": parted.times}
    state.log("parted", name, **facts, reason=reason)


def _duration(state: JobState, now: float) -> float:
    """Return the duration of the round that ends now, in seconds; 0 if another lighthouse announced it."""
    return 0.0 if state.round.began is None else now - state.round.began


# ---- the end of a probation


def let_in_due(state: JobState, now: float) -> None:
    """Let in the groups whose time is over."""
    if state.probation.groups:
        over = [name for name, one in state.probation.groups.items() if one.out and now >= one.until]
        _let_in_all(state, over, "its time is over")


def let_in_needed(state: JobState) -> bool:
    """Let in the parted groups that ask, if all others ask and are too few. Return whether any was let in."""
    groups = state.groups
    if not state.probation.groups or groups.asking_count < groups.counted:
        return False
    asking = [one.name for one in groups if one.is_excluded(Exclusion.PARTED) and one.request is not None]
    return _let_in_all(state, asking, "the others are too few for a quorum")


def let_in_at_end(state: JobState) -> bool:
    """Let in the groups that were parted because their heals failed. Return whether any was let in.

    They finish with the others. The end of a job has its own limit for failed heals.
    """
    groups, here = state.probation.groups, state.groups.by_name
    names = [name for name, one in groups.items() if one.out and one.cause == "heal" and name in here] if groups else []
    return _let_in_all(state, names, "the others finish")


def _let_in_reunited(state: JobState) -> bool:
    """Let in the groups that are parted from groups that are gone."""
    here = state.groups.by_name
    cut = {name for name, one in state.probation.groups.items() if one.out and one.cause == "cut" and name in here}
    alone = []
    for name, pairs in sorted(state.evidence.confirmed_against(cut).items()):
        others = {other for pair in pairs for other in pair} - {name}
        if others and others.isdisjoint(here):
            alone.append(name)
    return _let_in_all(state, alone, "no group is left that it could not reach")


def forgive(state: JobState, name: str, why: str) -> None:
    """End the probation of a group, if it has one."""
    if state.probation.is_out(name):
        _let_in(state, name, why)
    state.probation.forgive(name)
    state.evidence.forgive(name, state.probation.groups)


def _let_in_all(state: JobState, names: Iterable[str], why: str) -> bool:
    found = [*names]
    for name in found:
        _let_in(state, name, why)
    return bool(found)


def _let_in(state: JobState, name: str, why: str) -> None:
    """Let a group take part again, on trial."""
    state.probation.groups[name].out = False
    for group in state.groups.by_name.get(name, ()):
        if group.is_excluded(Exclusion.PARTED):
            state.groups.readmit(group)
    state.log("let_in", name, reason=why)


def keep_out(state: JobState, group: Group) -> None:
    """Exclude a group that is parted, and deny the retry that it has asked for. No effect on others."""
    parted = state.probation.groups.get(group.name)
    if parted is not None and parted.out:
        retries.deny_parted(state, group)
        if group.excluded is None:
            state.groups.exclude(group, Excluded(Exclusion.PARTED, parted.reason, parted.until))
