"""The end of training: the groups finish together, and the job is closed. Pure.

A group that has taken its last step asks with ``final``. A quorum with such a member is *finishing*: no member reduces
or commits in it, and groups that are behind heal from the others, also those that asked for a round without healing.
It forms when all healthy groups ask. Rules:

* **Closing.** When all members ask with ``final``, at one (step, lineage), and no group was lost within
  ``finish_grace``, the job is closed at that state: written first, then told to all of them. From then on, a request
  with ``final`` and that state gets the same answer, and every other request is denied, until an administrator reopens
  the job. A job that ends at step 0 is not closed: nothing was trained.
* **Groups behind.** A group that trains and is behind heals in the finishing quorum, finds that it has taken its last
  step, and asks with ``final``. After ``MAX_HEALS`` such quorums it is refused, so that the others end. Groups that
  are parted for their heals are let in: they may have been killed in them.
* **Other last steps.** Groups whose last steps differ have different scripts. The smaller side is refused; of two equal
  sides, the one that ends first. A group that asks to train from the state at which others finished may not know that
  state yet, so it is held back once.
* **Different weights.** Groups that finish at one (step, lineage) send the root digests of their weights. Those that
  differ from the majority heal in a finishing quorum, or are refused (``verification.divergence``): the job is not
  closed, and no state is published, before all weights are equal.
* **Publishing.** Groups that publish the final state ask with ``publish``, and get a quorum when all have that state;
  then they publish it, and ask again. All groups publish, or none: the smaller side is refused, of two equal sides the
  one that does not.
* **Spares.** Groups that found no place in the quorum are drained when the job is closed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from keepstep_lighthouse.quorum.events import ReopenOrdered
from keepstep_lighthouse.quorum.forming.announcing import members_of
from keepstep_lighthouse.quorum.forming.quorum_rules import Verdict, choose
from keepstep_lighthouse.quorum.groups.group import Excluded, Exclusion, Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence.departures import Departures
from keepstep_lighthouse.quorum.probation.probation import Probation
from keepstep_lighthouse.quorum.verification import divergence
from keepstep_lighthouse.quorum.verification.verification import Verification
from keepstep_lighthouse.quorum.views import reasons
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.lineage import Soundness, origin, reference_state, same_weights, soundness
from keepstep_mesh.protocol.membership import PUBLISHED, TO_PUBLISH, UNPUBLISHED, FinalState, Lineage
from keepstep_mesh.protocol.messages import Closed, Denied, QuorumRequest

MAX_HEALS = 3
"""Finishing quorums in which a group may heal without success."""


class Finishing:
    def __init__(self, job: JobState, probation: Probation, verification: Verification, departures: Departures) -> None:
        self._job, self._probation, self._verification, self._departures = job, probation, verification, departures
        self._heals: Counter[str] = Counter()
        """Finishing quorums in which groups were behind, by name."""

    def settle(self, judge_again: Callable[[], Verdict], now: float, now_unix: float) -> Verdict | None:
        """Decide about a quorum that is due, and that has members that ask with ``final``.

        Args:
            judge_again: returns the verdict after groups were let in or refused.

        Returns:
            The verdict that replaces its own; None: it forms, as a finishing one.
        """
        chosen = choose(self._job.groups, self._job.record)
        if not any(map(_is_final, chosen)):
            return None
        if self._probation.let_in_at_end():
            return judge_again()
        step, lineage = reference_state(members_of(chosen))
        if self._refuse_any(chosen, step, lineage):
            return judge_again()
        at_end = all(
            _is_final(group) and (group.step, group.lineage) == (step, lineage) and not group.diverged
            for group in chosen
        )
        comparison = self._verification.compare(chosen) if at_end else None
        if comparison is not None and divergence.refuse_at_end(self._job, comparison, chosen):
            return judge_again()
        at_end = at_end and (comparison is None or not comparison.diverged)
        if not at_end or any(_publish(group) == TO_PUBLISH for group in chosen):
            self._note_round(chosen, step, lineage)
            return None
        grace = self._job.record.policy.finish_grace
        until = max((lost + grace for lost in self._departures.expected(now).values()), default=now)
        if now < until:
            return Verdict("finish_grace", until)
        if comparison is not None:
            divergence.tell(self._job, comparison)
        self._close(chosen, now_unix, "" if comparison is None else comparison.right or "")
        return judge_again()

    def _note_round(self, chosen: list[Group], step: int, lineage: Lineage) -> None:
        """A finishing quorum forms. Note who heals in it, and who trains from the state at which others finished."""
        for group in chosen:
            if (group.step, group.lineage) != (step, lineage):
                self._heals[group.name] += 1
                continue
            del self._heals[group.name]
            if not _is_final(group):
                group.held_back_at = step, lineage

    # ---- groups that are refused

    def _refuse_any(self, chosen: list[Group], step: int, lineage: Lineage) -> bool:
        """Refuse groups that cannot finish with the others. Return whether any was refused."""
        for find in (_other_scripts, _other_ends):
            wrong, why = find(chosen)
            if wrong:
                self._refuse(wrong, "layout", why)
                return True
        behind = [group for group in chosen if (group.step, group.lineage) != (step, lineage)]
        if hopeless := [group for group in behind if self._heals[group.name] >= MAX_HEALS]:
            why = f"the others finished at step {step}, and {MAX_HEALS} heals to that state failed"
            why += "; the log has the reasons"
            self._refuse(hopeless, "start", why)
            return True
        return False

    def _refuse(self, groups: list[Group], code: str, why: str) -> None:
        for group in groups:
            self._job.deny(group, code, why)
            self._job.groups.exclude(group, Excluded(Exclusion.LAYOUT, why))  # the others do not wait for its end

    # ---- a job that is closed

    def _close(self, chosen: list[Group], now_unix: float, root: str) -> None:
        """Write the final state, tell it to the groups, and send the spares home. ``root``: digest of that state."""
        step, record = chosen[0].step, self._job.record
        final = FinalState(step, chosen[0].lineage, len(chosen), int(now_unix * 1000), root)
        self._job.reached = step
        self._heals.clear()
        if step:
            self._job.persist(replace(record, step=step, finished_step=step, closed=final))
        for group in chosen:
            if group.request is not None:
                self._tell_closed(group, group.request, final)
        self._job.log(
            "closed", "", step=step, groups=[group.replica_id for group in chosen], quorum_id=record.quorum_id
        )
        for group in self._job.groups.all_asking():
            self.send_home(group, f"the job finished at step {step}, and its quorum had no place for this group")
        for group in list(self._job.groups):
            if group.request is not None:  # of an excluded group
                self.answer(group, group.request)

    def send_home(self, group: Group, reason: str) -> None:
        """Let the group leave with exit code 0."""
        self._job.drain(group.replica_id, reason, "lighthouse")
        self._job.deny(group, "deadline", reason, logged=False)

    def answer(self, group: Group, request: QuorumRequest) -> bool:
        """Answer a request, if the job is closed. Return whether it is."""
        final = self._job.record.closed
        if final is None:
            return False
        self._job.groups.withdraw(group)
        group.highest_request = max(group.highest_request, request.request)
        self._job.groups.set_state(group, request)
        group.working_since = None
        holds = request.step == final.step and same_weights(request.lineage, final.lineage)
        if request.final and holds and not _has_other_root(request, final):
            self._tell_closed(group, request, final)
        elif group.stands_by:
            self._send_spare_home(group, request, final)
        elif request.final and holds:
            divergence.refuse_after_end(self._job, group, request, final)
        elif group.session is not None:
            why = _why_closed(final, request, holds=holds)
            self._job.tell(group.session, Denied(request.request, "start", why, closed=final))
            self._job.log("denied", group.replica_id, code="closed", reason=why)
        return True

    def _send_spare_home(self, group: Group, request: QuorumRequest, final: FinalState) -> None:
        reason = f"the job finished at step {final.step}, and no group needs this spare"
        self._job.drain(group.replica_id, reason, "lighthouse")
        if group.session is not None:
            self._job.tell(group.session, Denied(request.request, "deadline", reason))

    def _tell_closed(self, group: Group, request: QuorumRequest, final: FinalState) -> None:
        self._job.groups.withdraw(group)
        group.told_closed = True
        if group.session is not None:
            self._job.tell(group.session, Closed(request.request, final))

    def reopen(self, order: ReopenOrdered) -> None:
        """Let groups train on from the final state. No effect on an open job."""
        final = self._job.record.closed
        if final is not None:
            self._job.persist(replace(self._job.record, closed=None))
            self._job.log("reopened", "", by=order.by, step=final.step)


def _is_final(group: Group) -> bool:
    return group.request is not None and group.request.final


def _publish(group: Group) -> str:
    return group.request.publish if group.request is not None else ""


def _other_scripts(chosen: list[Group]) -> tuple[list[Group], str]:
    """Return the groups that are refused because their last step differs from that of others, and why."""
    sound = [group for group in chosen if soundness(group.step, group.lineage) is Soundness.SOUND]
    resumed = max((origin(group.lineage).resumed for group in sound), default=0)
    sound = [group for group in sound if origin(group.lineage).resumed == resumed]  # the job has left older histories
    final = [group for group in sound if _is_final(group)]
    if not final:
        return [], ""
    ends = min(group.step for group in final)
    first = [group for group in final if group.step == ends]
    on = [group for group in sound if group.step > ends or (not _is_final(group) and _was_held_back(group))]
    if not on:
        return [], ""
    beyond, do = max(group.step for group in on), "finished at" if all(map(_is_final, on)) else "continued after"
    why = (
        f"{named(group.name for group in first)} finished at step {ends}, and {named(group.name for group in on)} {do} "
        f"step {beyond}; let manager.current_step() decide in all groups which step is the last; a loop over range() "
        f"counts discarded steps too"
    )
    return (on if len(first) > len(on) else first), why


def _other_ends(chosen: list[Group]) -> tuple[list[Group], str]:
    """Return the groups that are refused because others publish the final state and they do not, or the reverse."""
    final = [group for group in chosen if _is_final(group)]
    omit = [group for group in final if _publish(group) == UNPUBLISHED]
    publish = [group for group in final if _publish(group) in (TO_PUBLISH, PUBLISHED)]
    if not omit or not publish:
        return [], ""
    why = (
        f"{named(group.name for group in publish)} called finish(publish=True), and "
        f"{named(group.name for group in omit)} called finish() without publish; give all groups and ranks the same "
        f"argument"
    )
    return (publish if len(omit) > len(publish) else omit), why


def _was_held_back(group: Group) -> bool:
    return group.held_back_at == (group.step, group.lineage)


def _has_other_root(request: QuorumRequest, final: FinalState) -> bool:
    return bool(final.root) and request.root is not None and request.root.digest != final.root


def _why_closed(final: FinalState, request: QuorumRequest, *, holds: bool) -> str:
    here = "that state, and trains on" if holds else f"another state, of step {request.step}"
    return (
        f"{reasons.closed(final).sentence}; this group has {here}; to train on, reopen the job (keepstep job reopen "
        f"JOB) and load a checkpoint of step {final.step}; to begin again, delete it (keepstep job rm JOB) or name "
        f"another job"
    )
