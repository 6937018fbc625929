"""Quorums that would begin below the step that the job has reached. Pure.

A quorum begins at the step of its reference state; all others heal. It is below the job's step when no group that had
that step takes part, and no checkpoint of it was loaded:

* **The job is finished.** A group that died near the end would train the whole job again. Its request is denied if it
  begins far below the step at which groups finished: by more than a tenth, and by more than ``FEW_STEPS``. A smaller
  distance is that of an older checkpoint, or of a trial of a few steps.
* **The job goes back.** With ``refuse_going_back`` the requests are denied, unless it goes back by one step. After the
  loss of all members, the next quorum waits for the groups as the first one does: another group may have a later
  checkpoint. While a connected group has the job's step, the others may ask again. Otherwise the job goes back, and an
  event says so; not for one step while groups are left, because groups may differ by one step after a failure.
* **Groups that train while they ask** may be behind when the others finish. Alone they would repeat steps of the job,
  so they are drained.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.events import Announce
from keepstep_lighthouse.quorum.forming.announcing import members_of
from keepstep_lighthouse.quorum.forming.quorum_rules import choose, min_groups
from keepstep_lighthouse.quorum.job_record import JobEnd
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.lineage import LOADED, is_live, reference_state

FAR_BELOW = 10
"""A start is far below the step at which groups finished if it is below by more than one part of so many."""
FEW_STEPS = 10
"""A smaller distance is never far."""


def settle(job: JobState) -> bool:
    """Deny the open requests if their quorum would begin too low. Return whether any was denied."""
    if not job.finished_step and not job.record.policy.refuse_going_back:
        return False
    if all(group.step >= job.reached for group in job.groups.all_asking()):
        return False
    chosen = choose(job.groups, job.record)
    step, _ = reference_state(members_of(chosen))
    code, sentence = _refusal(job, step)
    if sentence:
        for group in job.groups.all_asking():
            job.deny(group, code, sentence)
    return bool(sentence)


def _refusal(job: JobState, step: int) -> tuple[str, str]:
    """Return the code and the reason if no quorum may begin at ``step``; empty: it may."""
    reached, finished = job.reached, job.finished_step
    if step < finished - max(finished // FAR_BELOW, FEW_STEPS):
        return "start", (
            f"the job finished at step {finished}, and a start at step {step} would train it again; to go on, load a "
            f"checkpoint of step {finished}; to begin again, delete the job (keepstep job rm JOB) or name another job"
        )
    if not job.record.policy.refuse_going_back or step >= reached - 1:
        return "", ""
    if later := [one for one in job.groups if one.member and one.request is None and one.step >= reached - 1]:
        names = named(one.name for one in later)
        return "deadline", f"the job has reached step {reached}, and {names} with that step did not ask in time"
    return "start", (
        f"the job had reached step {reached}, and no connected group has more than step {step}; load a checkpoint "
        f"of step {reached}, or allow it to go back (keepstep policy JOB --refuse-going-back false)"
    )


def drain_left_behind(job: JobState) -> None:
    """Drain the groups that ask to catch up with a job that has finished."""
    finished = job.finished_step
    if not finished or not min_groups(job.groups):
        return
    if any(group.step + (group.working_since is not None) >= finished for group in job.groups):
        return
    reason = f"the job finished at step {finished}, and this group was behind"
    for group in job.groups.all_asking():
        if is_live(group.step, group.lineage) and group.draining is None:  # not one with a checkpoint
            job.drain(group.replica_id, reason, "lighthouse")
            job.deny(group, "deadline", reason)


def log_going_back(job: JobState, announce: Announce, ended: JobEnd | None) -> None:
    """A quorum below the job's step was announced. ``ended``: how the job had ended before."""
    usual = 1 if ended is None else 0
    if announce.step >= job.reached - usual:
        return
    why = "no group with a later step takes part"
    if ended is not None:
        why = f"no group was left: {ended.why}" if ended.why else f"the job had {ended.code}"
    elif isinstance(announce.lineage, str) and announce.lineage.startswith(LOADED):
        why = "a checkpoint of an earlier step was loaded"
    facts = {"from": job.reached, "to": announce.step, "lost_steps": job.reached - announce.step}
    job.log("went_back", "", **facts, reason=why)
