"""Part the groups that keep others from committing, and let them in again. Pure.

Before a quorum forms after a failed round, the evidence of its members is judged (``evidence``). The groups that
explain what is confirmed are parted (``partings``): they stay connected, and quorums form without them. Rules:

* A round that lost a member is not judged: the loss explains it.
* The fewest groups are parted. Of two that are accused equally often: not a member of the last quorum that committed,
  then the one that arrived later, then the one with the higher name. Where a model exists once, first the one without
  which the others have all shards of the newest state.
* Quorums keep the number of groups that they need (``min_replicas``, with the spares that are ready), and all shards.
  Otherwise no group is parted, and the reason of the quorum says so. If the others become too few later, parted groups
  are let in.
* A heal that did not end in a commit counts too, from the second in a row on, unless another member failed by itself.
* A parted group is let in when its time is over, when no group is left that it could not reach, when the evidence
  accuses another group instead, or when an operator says so; one that is parted for its heals, also when the others
  finish. It is then on trial until it commits a step.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from keepstep_lighthouse.quorum import retries
from keepstep_lighthouse.quorum.forming.quorum_rules import least_candidates
from keepstep_lighthouse.quorum.groups.group import Excluded, Exclusion, Group
from keepstep_lighthouse.quorum.job_state import JobState, Round
from keepstep_lighthouse.quorum.probation.evidence import Accusation, Evidence, accusations, cover, mutual
from keepstep_lighthouse.quorum.probation.partings import Cause, Partings
from keepstep_lighthouse.quorum.shards import Shards
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.membership import OWN, StepFailure
from keepstep_mesh.protocol.messages import QuorumRequest
from keepstep_mesh.protocol.names import name_of

Causes = dict[str, tuple[Cause, str]]
"""Why groups must be parted, by stable name: the cause, and a sentence."""


@dataclass(slots=True)
class _FailedRound:
    """Reports of members that have asked again after a failed round."""

    round: Round
    failures: dict[str, StepFailure] = field(default_factory=dict)
    """Why the step failed in them, by stable name."""
    heals: dict[str, str] = field(default_factory=dict)
    """Errors of those whose heal did not end in a commit, by stable name."""
    judged: bool = False


class Probation:
    def __init__(self, job: JobState, shards: Shards) -> None:
        self._job, self._shards = job, shards
        self.partings = Partings()
        self.active = False
        """``settle`` may have something to do."""
        self._evidence = Evidence()
        self._failed = _FailedRound(job.round)

    def note(self, group: Group, request: QuorumRequest) -> None:
        """A group asks. Note why its last step failed, and whether its heal did."""
        if not group.member or not request.commit_failures:
            return
        failure = request.failure
        if failure is not None and failure.quorum_id == self._job.record.quorum_id:
            self._this_round().failures[group.name] = failure
            self.active = True
        if group.heal is not None and not group.heal_given_up:
            told = group.heal.progress
            if told.error or not told.ended:
                self._this_round().heals[group.name] = told.error or "it did not end"
                self.active = True

    def committed(self, group: Group) -> None:
        """The group committed a step: its probation ends."""
        partings, name = self.partings, group.name
        if (name in partings.failed_heals or name in partings.groups) and not partings.is_out(name):
            self.forgive(name, "it committed a step")

    def lost_while_healing(self, group: Group, reason: str, now: float) -> None:
        """A member is lost. If it was healing, its heal failed; it had loaded the state if it has said so."""
        if not group.member or group.heal is None or group.heal_given_up:
            return
        told = group.heal.progress
        if (told.error or not told.ended) and self.partings.heal_failed(group.name):
            self._part(group.name, "heal", self._failed_heals(group.name, reason), now)

    # ---- before a quorum forms

    def settle(self, now: float) -> bool:
        """Judge the round that ended, before the next quorum forms. Return whether other groups count now."""
        round_ = self._this_round()
        failed = bool(round_.failures or round_.heals)
        if not failed:
            self.partings.refused = ""
            if not self.partings.groups:
                self.active = False
                return False
        changed = self._let_in_reunited()
        if failed and not round_.judged:
            round_.judged = True
            changed |= self._judge(round_, now)
        return changed

    def _this_round(self) -> _FailedRound:
        if self._failed.round is not self._job.round:
            self._failed = _FailedRound(self._job.round)
        return self._failed

    def _judge(self, failed: _FailedRound, now: float) -> bool:
        round_, groups, partings = failed.round, self._job.groups, self.partings
        if round_.lost or any(group.member for group in groups.suspects.values()):
            return False
        duration = self._duration(now)
        members = {name_of(one) for one in self._job.record.members}
        found = accusations(failed.failures, members)
        believed = mutual(failed.failures, members) if groups.sources else ()
        confirmed = self._evidence.add(found, round_.number, duration, now, partings.groups, believed)
        out = self._cut_off()
        accused = {one for one in confirmed if all(name in groups.by_name for name in one)}
        accused = accused.union(*self._evidence.confirmed_against(out).values()) if accused else set()
        proven = {group.name for group in self._job.proven}
        chosen = cover(accused, lambda name: self._suspicion(name, proven))
        causes = {name: self._cause(name, accused) for name in sorted(chosen - out)} | self._broken_heals(failed)
        if self._needed(causes, out):
            return False
        for name in sorted(out - chosen) if accused else ():
            self._let_in(name, f"the failures of {named(sorted(chosen))} explain why it was parted")
        for name, (cause, reason) in causes.items():
            self._part(name, cause, reason, now)
        return bool(causes)

    def _suspicion(self, name: str, proven: Container[str]) -> tuple[bool, bool, int, str]:
        """Return what decides between groups that are accused equally often; the highest is parted."""
        arrived = max((group.arrived for group in self._job.groups.by_name.get(name, ())), default=0)
        return self._shards.complete_without({name}), name not in proven, arrived, name

    def _cause(self, name: str, accused: set[Accusation]) -> tuple[Cause, str]:
        failure = self._this_round().failures.get(name)
        if failure is not None and failure.cause == OWN and frozenset((name,)) in accused:
            return "own", f"{name} fails by itself: {failure.reason or 'it gave no reason'}"
        others = sorted({other for one in accused if name in one for other in one} - {name})
        if not others and failure is not None:
            others = sorted(map(name_of, failure.peers))
        return "cut", f"{name} and {named(others)} cannot reach each other"

    def _broken_heals(self, failed: _FailedRound) -> Causes:
        """Count the heals that failed in this round. Return the groups to part for it."""
        causes: Causes = {}
        for name, error in sorted(failed.heals.items()):
            if any(other != name and failure.cause == OWN for other, failure in failed.failures.items()):
                continue
            if self.partings.heal_failed(name) or name in self.partings.groups:
                causes[name] = "heal", self._failed_heals(name, error)
        return causes

    def _failed_heals(self, name: str, error: str) -> str:
        failed = self.partings.failed_heals.get(name, 0)
        return f"{failed} heal{'' if failed == 1 else 's'} of {name} failed in a row: {error}"

    def _needed(self, causes: Causes, out: Collection[str]) -> bool:
        """Return whether a quorum needs these groups; note why they are not parted.

        Args:
            causes: groups that together have a shard are reduced to those without which it can be had.
            out: names of the groups that are parted already.
        """
        groups, parted = self._job.groups, {*out}
        for name in causes:
            if self._shards.complete_without({*parted, name}):
                parted.add(name)
        for name in [] if parted.isdisjoint(causes) else [*causes.keys() - parted]:
            del causes[name]
        stay = [one for one in groups.all_asking() if one.name not in causes and (one.member or not groups.shrinking)]
        left, least = len(stay) + len(groups.ready_spares()), least_candidates(groups, self._job.record.policy)
        short = f"{left} would be left and a quorum needs {least} groups" if left < least else ""
        short = short or ("the others do not have all shards of the model" if parted.isdisjoint(causes) else "")
        self.partings.refused = ""
        if not causes or not short:
            return False
        why = "; ".join(sentence for _, sentence in causes.values())
        self.partings.refused = f"{why}; not parted, because {short}"
        self._job.log("not_parted", "", groups=sorted(causes), reason=self.partings.refused)
        return True

    def _part(self, name: str, cause: Cause, reason: str, now: float) -> None:
        self.active = True
        parted = self.partings.part(name, cause, reason, self._duration(now), now)
        for group in self._job.groups.by_name.get(name, ()):
            self.keep_out(group)
        facts = {"cause": cause, "seconds": round(parted.until - now, 1), "times": parted.times}
        self._job.log("parted", name, **facts, reason=reason)

    def _duration(self, now: float) -> float:
        """Return the duration of the round that ends now, in seconds; 0 if another lighthouse announced it."""
        return 0.0 if self._job.round.began is None else now - self._job.round.began

    # ---- the end of a probation

    def let_in_due(self, now: float) -> None:
        """Let in the groups whose time is over."""
        if self.partings.groups:
            over = [name for name, one in self.partings.groups.items() if one.out and now >= one.until]
            self._let_in_all(over, "its time is over")

    def let_in_needed(self) -> bool:
        """Let in the parted groups that ask, if all others ask and are too few. Return whether any was let in."""
        groups = self._job.groups
        if not self.partings.groups or groups.asking_count < groups.counted:
            return False
        asking = [one.name for one in groups if one.is_excluded(Exclusion.PARTED) and one.request is not None]
        return self._let_in_all(asking, "the others are too few for a quorum")

    def let_in_at_end(self) -> bool:
        """Let in the groups that were parted because their heals failed. Return whether any was let in.

        They finish with the others. The end of a job has its own limit for failed heals.
        """
        groups, here = self.partings.groups, self._job.groups.by_name
        names = (
            [name for name, one in groups.items() if one.out and one.cause == "heal" and name in here] if groups else []
        )
        return self._let_in_all(names, "the others finish")

    def _let_in_reunited(self) -> bool:
        """Let in the groups that are parted from groups that are gone."""
        here = self._job.groups.by_name
        alone = []
        for name, pairs in sorted(self._evidence.confirmed_against(self._cut_off()).items()):
            others = {other for pair in pairs for other in pair} - {name}
            if others and others.isdisjoint(here):
                alone.append(name)
        return self._let_in_all(alone, "no group is left that it could not reach")

    def _cut_off(self) -> set[str]:
        """Return the names of the groups here that are parted because they and others could not reach each other."""
        here = self._job.groups.by_name
        return {name for name, one in self.partings.groups.items() if one.out and one.cause == "cut" and name in here}

    def forgive(self, name: str, why: str) -> None:
        """End the probation of a group, if it has one."""
        if self.partings.is_out(name):
            self._let_in(name, why)
        self.partings.forgive(name)
        self._evidence.forgive(name, self.partings.groups)

    def _let_in_all(self, names: Iterable[str], why: str) -> bool:
        found = [*names]
        for name in found:
            self._let_in(name, why)
        return bool(found)

    def _let_in(self, name: str, why: str) -> None:
        """Let a group take part again, on trial."""
        self.partings.groups[name].out = False
        for group in self._job.groups.by_name.get(name, ()):
            if group.is_excluded(Exclusion.PARTED):
                self._job.groups.readmit(group)
        self._job.log("let_in", name, reason=why)

    def keep_out(self, group: Group) -> None:
        """Exclude a group that is parted, and deny the retry that it has asked for. No effect on others."""
        parted = self.partings.groups.get(group.name)
        if parted is not None and parted.out:
            retries.deny_parted(self._job, group)
            if group.excluded is None:
                self._job.groups.exclude(group, Excluded(Exclusion.PARTED, parted.reason, parted.until))

    def validate(self) -> None:
        """Raise AssertionError with a sentence when an invariant is violated."""
        parted = [group.name for group in self._job.groups if group.is_excluded(Exclusion.PARTED)]
        assert all(map(self.partings.is_out, parted)), "a group is kept out without a reason"
