"""Let the features act after an event, in their order, and form a quorum if one is due. Pure.

A feature may let groups in or refuse them before a quorum forms. The requests are judged again after each change, so
what forms in the end fits all features. Most events concern no feature: then none is called.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum import retries, stragglers
from keepstep_lighthouse.quorum.features import Features
from keepstep_lighthouse.quorum.finishing import starts
from keepstep_lighthouse.quorum.forming import membership
from keepstep_lighthouse.quorum.forming.quorum_rules import ANNOUNCING, NOBODY, Verdict, choose, judge
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import Round
from keepstep_lighthouse.quorum.verification import divergence
from keepstep_lighthouse.quorum.views import job_status
from keepstep_lighthouse.quorum.views.job_status import JOB_STANDS_SECONDS
from keepstep_lighthouse.quorum.views.reasons import Formed
from keepstep_mesh.protocol.messages import RoundBroken


class Settling:
    def __init__(self, features: Features) -> None:
        self._features, self._job = features, features.job
        self.verdict = NOBODY
        """On the open requests."""
        self.formed: Formed | None = None
        """How the last quorum was formed; None: not by this lighthouse."""

    def settle(self, now: float, now_unix: float) -> None:
        """Let the features act, and form a quorum if one is due."""
        job, features, groups = self._job, self._features, self._job.groups
        probation, departures, spares = features.probation, features.departures, features.spares
        if groups.suspects:
            departures.lose_reported(now)
        if probation.partings.groups:
            probation.let_in_due(now)
        last_gone = departures.last_gone is not None
        if last_gone or spares.dismissed is not None or groups.standing_by or job.record.replacing:
            spares.settle(now)
        if last_gone:
            departures.conclude(now_unix)
        if job.record.finished_step:
            starts.drain_left_behind(job)
        self.verdict = self._judge(now)
        if self.verdict.code in ANNOUNCING or probation.partings.groups or groups.shrinking:  # not after most requests
            self._form(now, now_unix)
        if job.record.replacing:
            spares.drain_replaced()
        if job.leaving_later:
            features.shards.let_leave()

    @property
    def _is_due(self) -> bool:
        return self.verdict.code in ANNOUNCING

    def _judge(self, now: float, *, initial: bool = True) -> Verdict:
        takeover = self._features.takeover
        job, interrupted = self._job, takeover.interrupted
        return judge(job.groups, job.record, takeover.until, now, initial=initial, interrupted=interrupted)

    def _form(self, now: float, now_unix: float) -> None:
        """Form a quorum, if the verdict holds after those groups were refused that do not fit."""
        job, features, groups, policy = self._job, self._features, self._job.groups, self._job.record.policy
        if self._is_due and features.probation.active and features.probation.settle(now):
            if groups.standing_by:
                features.spares.settle(now)  # a spare takes the place of a group that is parted
            self.verdict = self._judge(now)
        if self.verdict.code == "min_replicas" and features.probation.let_in_needed():
            self.verdict = self._judge(now)
        joins = groups.asking_count > groups.members_asking
        if self._is_due and (joins or not features.agreements.compared) and features.agreements.settle():
            self.verdict = self._judge(now, initial=False)  # the others do not wait for a group that was denied
        if self._is_due and features.reports.failed and features.reports.end_minority():
            self.verdict = self._judge(now)
        if self._is_due and features.reports.values_differ and features.reports.settle_values():
            self.verdict = self._judge(now)
        if self._is_due and groups.roots > 1 and features.verification.refuse_diverged():
            self.verdict = self._judge(now)
        if self._is_due and (job.record.finished_step or policy.refuse_going_back) and starts.settle(job):
            self.verdict = self._judge(now)
        if groups.shrinking and features.takeover.until is None:
            self.verdict = retries.settle(job, self.verdict, lambda: self._judge(now, initial=False))
        while self._is_due and groups.final:
            again = features.finishing.settle(lambda: self._judge(now, initial=False), now, now_unix)
            if again is None:
                break
            self.verdict = again
        if self._is_due and (waits := features.shards.waits(now)) is not None:
            self.verdict = waits
        if self._is_due:
            self._announce(now, now_unix)
            self.verdict = self._judge(now, initial=False) if groups.asking_count else NOBODY

    def _announce(self, now: float, now_unix: float) -> None:
        """Announce the quorum that is due, and tell the features what they have to know of it."""
        job, features, groups, code = self._job, self._features, self._job.groups, self.verdict.code
        before, verification = job.record, features.verification
        chosen, first_asked = choose(groups, before), groups.first_asked()
        may_have_stood = not groups.members_asking or groups.waited(now) > JOB_STANDS_SECONDS
        if may_have_stood and job_status.begins_to_run(groups, now):
            job.active_since = now_unix
        comparison, differ = None, ""
        if groups.roots > 1 or verification.refused is not None:
            comparison, differ = verification.settle(chosen)
        left_behind = membership.change(job, chosen, now_unix)
        if job.record.quorum_id != before.quorum_id:
            features.departures.last_gone = None
        given_up = groups.heals.give_up() if code == "stragglers_dropped" else []
        left_out = groups.counted - len(chosen)
        room = before.policy.max_replicas - len(chosen) if before.policy.max_replicas else left_out
        if first_asked is not None and now - first_asked > before.policy.join_timeout / 2:
            stragglers.log_wait(job)
        last = job.last
        announce = features.announcer.announce(chosen, max(0, min(left_out, room)), verification.asks_for_roots, differ)
        forbid_heal = [] if announce.allow_heal else [g.replica_id for g in chosen if _forbids_heal(g)]
        retried = retries.note(job, chosen) if groups.shrinking else []
        groups.close_round(announce, chosen, now)
        spares = groups.spares()
        job.decisions.append(announce)
        if announce.step < job.reached:
            features.reports.went_back(announce.step)
            starts.log_going_back(job, announce, before.ended)
        job.reached = announce.step
        if last is None:
            features.takeover.quorum_formed()
        features.hangs.round_begins(now)
        job.round = Round(job.round.number + 1, now)
        if left_behind:
            reason = f"quorum {before.quorum_id} is over, the job is at {announce.quorum_id}"
            job.tell_all(left_behind, RoundBroken(before.quorum_id, reason))
        partings = features.probation.partings
        self.formed = Formed(
            code=code,
            quorum_id=announce.quorum_id,
            members=len(chosen),
            left_out=sorted(g.replica_id for g in groups if g.excluded is None and not g.member) if left_out else [],
            forbid_heal=forbid_heal,
            spares=spares,
            parted=[one.reason for one in partings.groups.values() if one.out],
            refused=partings.refused,
            retried=retried,
        )
        if announce.quorum_id != before.quorum_id:
            listed = list(job.record.members)
            job.log("quorum", "", quorum_id=announce.quorum_id, members=listed, reason=self.formed.reason.sentence)
        for group, failed in given_up:
            job.log("heal_given_up", group.replica_id, failed_heals=failed)
        if comparison is not None:
            divergence.tell(job, comparison)


def _forbids_heal(group: Group) -> bool:
    return group.request is not None and not group.request.allow_heal
