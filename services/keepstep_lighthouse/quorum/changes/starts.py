"""Quorums that would begin below the step that the job has reached. Pure.

The step of a quorum is the highest of its members; all others heal. It is below the job's step when the groups that
had that step are gone, and no checkpoint of it was loaded:

* **The job is finished.** A group that died near the end would train the whole job again. Its request is denied if it
  begins far below the step at which groups finished: by more than a tenth, and by more than ``FEW_STEPS``. A smaller
  distance is that of an older checkpoint, or of a trial of a few steps.
* **The job goes back.** With ``refuse_going_back`` the requests are denied. One step is allowed: after a failure,
  groups may differ by one step. Otherwise the job goes back, and an event says so.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.events import JobEnd
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_mesh.protocol.messages import Denied

FAR_BELOW = 10
"""A start is far below the step at which groups finished if it is below by more than one part of so many."""
FEW_STEPS = 10
"""A smaller distance is never far."""


def settle(state: JobState) -> bool:
    """Deny the open requests if their quorum would begin too low. Return whether any was denied."""
    if all(group.step < state.reached for group in state.groups.asking.values()):
        step = max((group.step for group in state.groups.all_asking()), default=state.reached)
        sentence = _refusal(state, step)
        if sentence:
            _deny_all(state, sentence)
        return bool(sentence)
    return False


def _refusal(state: JobState, step: int) -> str:
    """Return why no quorum may begin at ``step``; empty: it may."""
    reached, finished = state.reached, state.finished_step
    if step < finished - max(finished // FAR_BELOW, FEW_STEPS):
        return (
            f"the job finished at step {finished}, and a start at step {step} would train it again; to go on, load a "
            f"checkpoint of step {finished}; to begin again, delete the job (keepstep job rm JOB) or name another job"
        )
    if state.record.policy.refuse_going_back and step < reached - 1:
        return (
            f"the job had reached step {reached}, and no connected group has more than step {step}; load a checkpoint "
            f"of step {reached}, or allow it to go back (keepstep policy JOB --refuse-going-back false)"
        )
    return ""


def _deny_all(state: JobState, sentence: str) -> None:
    for group in state.groups.all_asking():
        request = group.request
        state.groups.withdraw(group)
        if request is not None and group.session is not None:
            state.tell(group.session, Denied(request.request, "start", sentence))
            state.log("denied", group.replica_id, code="start", reason=sentence)


def note(state: JobState, step: int, ended: JobEnd | None) -> None:
    """A quorum begins at ``step``. ``ended``: how the job had ended before."""
    if step < state.reached:
        why = "the groups with a later step are gone"
        if ended is not None:
            why = f"no group was left: {ended.why}" if ended.why else f"the job had {ended.code}"
        facts = {"from": state.reached, "to": step, "lost_steps": state.reached - step}
        state.log("went_back", "", **facts, reason=why)
    state.reached = step
