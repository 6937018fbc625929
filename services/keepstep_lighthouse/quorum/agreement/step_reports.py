"""Compare what groups report about their last steps, and refuse or heal those that differ. Pure.

**Collectives.** A collective needs every group of its quorum. A group that began more collectives in a step than
another group completed therefore waits for a collective that never comes, and its step fails after the timeout. Fewer
collectives prove nothing: a step that fails early ends before the others. A single difference may come from a group
that joins, whose script does not know the step of the others yet. Two in a row come from different scripts: these
groups can never commit a step together. The smaller side ends, because the script of one group is more likely to be
wrong than those of all others. Both sides end if they are equally large.

**Quantized collectives.** A collective that sends encoded values does not fit one that does not. Groups of which one
began only the former in a step and the other only the latter have different scripts, or settings. They end in the same
way.

**Values of optimizers.** Groups that step with other learning rates, or other values, have other weights from then on.
The values of most groups are right; of equally many, those of the group that connected first. The others heal, because
a single such step can come from a script that joins; after the second one they are refused.

**Contributions that are not finite.** A NaN in one group makes the average NaN in all groups, so all of them contribute
NaNs from the next step on. Only the groups with the first one are named.

Reports are not stored. A lighthouse that takes over forgets them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from keepstep_lighthouse.quorum.agreement.agreements import Agreements
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_record import VALUES
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.verification import divergence
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_mesh.protocol.lineage import is_torn
from keepstep_mesh.protocol.membership import Data, StepReport

MAX_DURABLE_RELAYS = 100
REMEMBERED_STEPS = 256
"""Steps whose number of collectives is remembered for groups that report late."""


@dataclass(slots=True)
class Completed:
    """Groups that committed a step, all with the same number of collectives."""

    collectives: int
    groups: int
    first: str
    """replica_id of the first of them."""
    values: dict[str, int] = field(default_factory=dict)
    """Number of groups, by ``StepReport.values``."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Groups that began different numbers of collectives in one step."""

    quorum_id: int
    step: int
    completed: Completed
    began: dict[str, int]
    """Collectives of each group that began more of them, by replica_id."""
    repeated: bool
    """Whether one of these groups differed in its step before this one too."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """Groups of which some sent encoded values in all collectives of a step, and others in none."""

    step: int
    encoded: tuple[str, ...]
    """replica_ids, sorted."""
    plain: tuple[str, ...]
    """replica_ids, sorted."""
    repeated: bool
    """Whether one of these groups differed in its step before this one too."""


class StepReports:
    """The last reports of all groups of a job."""

    def __init__(self, job: JobState, agreements: Agreements) -> None:
        self._job, self._agreements = job, agreements
        self._completed: OrderedDict[tuple[int, int], Completed] = OrderedDict()
        """By (quorum_id, step)."""
        self.failed: dict[str, StepReport] = {}
        """The report of each group whose last step failed."""
        self._differed: set[str] = set()
        """Groups that began more or other collectives than others, and have not committed a step since."""
        self.values_differ: dict[tuple[int, int], None] = {}
        """Steps, by (quorum_id, step), in which the values of groups differ."""
        self._poisoned = (-1, -1)
        """The first and the last of the steps in a row whose weights follow from an average that was not finite."""

    # ---- what groups report

    def note_durable_relays(self, relays: tuple[str, ...]) -> None:
        """Store which relays have the newest durable checkpoint, for a group that resumes after the loss of all."""
        relays = relays[:MAX_DURABLE_RELAYS]
        if relays != self._job.record.durable_relays:
            self._job.persist(replace(self._job.record, durable_relays=relays))

    def note(self, group: Group, report: StepReport) -> None:
        """Note the report of a request. A request that is sent again has the report of the one before."""
        before = group.last_step
        if before is not None and before.step == report.step and before == report:
            return
        group.last_step = report
        self._add(group.replica_id, report)
        if not report.nonfinite:
            return
        self._job.groups.tally.nonfinite += 1
        if self._is_first_nonfinite(report) and not (before is not None and before.nonfinite):
            self._job.log("nonfinite", group.replica_id, step=report.step_after, committed=report.committed)

    def forget(self, replica_id: str) -> None:
        """Drop the failed steps of a group that is gone, or has committed a step."""
        self.failed.pop(replica_id, None)
        self._differed.discard(replica_id)

    def went_back(self, step: int) -> None:
        """Note that the job goes on from ``step``: later steps come again, with other contributions."""
        first, last = self._poisoned
        self._poisoned = (first, min(last, step)) if step >= first else (-1, -1)

    def _add(self, replica_id: str, report: StepReport) -> None:
        """Note a new report of a group."""
        if not report.committed:
            self.failed[replica_id] = report
            return
        if self.failed or self._differed:
            self.forget(replica_id)
        key = report.quorum_id, report.step
        known = self._completed.get(key)
        if known is None:
            known = self._completed[key] = Completed(report.collectives, 1, replica_id)
            if len(self._completed) > REMEMBERED_STEPS:
                self._completed.popitem(last=False)
        elif known.collectives == report.collectives:
            known.groups += 1
        if report.values:
            known.values[report.values] = known.values.get(report.values, 0) + 1
            if len(known.values) > 1:
                self.values_differ[key] = None

    def _is_first_nonfinite(self, report: StepReport) -> bool:
        """Note a contribution that was not finite. Return False if it follows from one in an earlier step."""
        first, last = self._poisoned
        follows = first <= report.step <= last
        if report.committed and not first <= report.step_after <= last:
            self._poisoned = (first if follows else report.step_after), report.step_after
        return not follows

    # ---- before a quorum forms

    def end_minority(self) -> bool:
        """Deny the requests of groups whose collectives differed twice. Return whether any was denied."""
        if (mismatch := self._take_mismatch()) is not None:
            return self._end_by_number(mismatch)
        if (mixture := self._take_mixture()) is not None:
            return self._end_by_encoding(mixture)
        return False

    def settle_values(self) -> bool:
        """Heal or refuse groups whose optimizers stepped with other values. Return whether any was refused."""
        refused = False
        for key, completed in self._take_other_values():
            sides: dict[str, list[Group]] = {}
            for group in self._job.groups.all_asking():
                report = group.last_step
                if report is not None and report.committed and report.values and (report.quorum_id, report.step) == key:
                    sides.setdefault(report.values, []).append(group)
            if len(sides) > 1:
                sizes = completed.values
                right = max(sides, key=lambda side: (sizes[side], -min(one.arrived for one in sides[side])))
                others = sides.pop(right)
                wrong = [group for side in sides.values() for group in side]
                refused |= self._settle_side(key, wrong, others)
        return refused

    def _settle_side(self, key: tuple[int, int], wrong: list[Group], others: list[Group]) -> bool:
        action, step = self._job.record.policy.on_divergence, key[1]
        what = (
            f"the optimizers of {named(one.name for one in wrong)} stepped with other values than those of "
            f"{named(one.name for one in others)} in the step after step {step}"
        )
        again = [group for group in wrong if action == "heal" and self._stepped_apart(group, key)]
        facts: dict[str, Data] = {"step": step, "groups": sorted(group.replica_id for group in wrong)}
        facts["refused"] = sorted(group.replica_id for group in again)
        self._job.log("values_differ", "", **facts, action=action, reason=what)
        for group in wrong:
            if group in again and group.request is not None:
                self._agreements.deny(group, group.request, f"{what}, again after a heal", others[0].info.address)
            elif action == "heal":
                group.diverged = not is_torn(group.lineage)
                divergence.note(self._job, group, VALUES, *key)
            elif action == "drain":
                self._job.drain(group.replica_id, what, by="on_divergence")
        return bool(again)

    def _stepped_apart(self, group: Group, key: tuple[int, int]) -> bool:
        """Return whether the optimizers of the group stepped with other values in an earlier step than this one."""
        first = divergence.first_difference(self._job, group, VALUES)
        return first is not None and (first.quorum_id, first.step) != key

    def _end_by_number(self, mismatch: Mismatch) -> bool:
        asking = self._job.groups.all_asking()
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
        self._job.log("collectives_differ", "", **facts, reason=sentence)
        return self._end(ends, sentence)

    def _end_by_encoding(self, mixture: Mixture) -> bool:
        asking = self._job.groups.all_asking()
        encoded = [group for group in asking if group.replica_id in mixture.encoded]
        plain = [group for group in asking if group.replica_id in mixture.plain]
        ends = _smaller(encoded, plain, len(mixture.encoded) - len(mixture.plain)) if mixture.repeated else []
        sentence = (
            f"not all groups quantize: in the step after step {mixture.step}, {named([*mixture.encoded])} sent "
            f"encoded values and {named([*mixture.plain])} did not; give should_quantize and the codec the same value "
            f"in all groups"
        )
        facts: dict[str, Data] = {
            "step": mixture.step,
            "encoded": list(mixture.encoded),
            "plain": list(mixture.plain),
            "ended": sorted(group.replica_id for group in ends),
        }
        self._job.log("collectives_differ", "", **facts, reason=sentence)
        return self._end(ends, sentence)

    def _end(self, ends: list[Group], sentence: str) -> bool:
        """Deny the requests of groups. Return whether any was denied."""
        for group in ends:
            self._job.deny(group, "collectives", sentence, logged=False)
        return bool(ends)

    # ---- what differs

    def _take_other_values(self) -> list[tuple[tuple[int, int], Completed]]:
        """Return the steps, by (quorum_id, step), in which values of groups differ, and forget that they do."""
        found, self.values_differ = self.values_differ, {}
        return [(key, self._completed[key]) for key in found if key in self._completed]

    def _take_mismatch(self) -> Mismatch | None:
        """Return the first mismatch and forget it; None: all groups agree as far as known."""
        for report in self.failed.values():
            key = report.quorum_id, report.step
            completed = self._completed.get(key)
            if completed is not None and report.collectives > completed.collectives:
                began = {
                    replica_id: one.collectives
                    for replica_id, one in self.failed.items()
                    if (one.quorum_id, one.step) == key and one.collectives > completed.collectives
                }
                for replica_id in began:
                    del self.failed[replica_id]
                repeated = not self._differed.isdisjoint(began)
                self._differed.update(began)
                return Mismatch(report.quorum_id, report.step, completed, began, repeated)
        return None

    def _take_mixture(self) -> Mixture | None:
        """Return the first mixture of encoded and plain collectives and forget it; None: none is known."""
        for report in self.failed.values():
            same = {
                replica_id: one
                for replica_id, one in self.failed.items()
                if (one.quorum_id, one.step) == (report.quorum_id, report.step) and one.collectives
            }
            encoded = sorted(replica_id for replica_id, one in same.items() if one.quantized == one.collectives)
            plain = sorted(replica_id for replica_id, one in same.items() if not one.quantized)
            if encoded and plain:
                both = {*encoded, *plain}
                for replica_id in both:
                    del self.failed[replica_id]
                repeated = not self._differed.isdisjoint(both)
                self._differed |= both
                return Mixture(report.step, tuple(encoded), tuple(plain), repeated)
        return None


def _smaller(first: list[Group], second: list[Group], lead: int) -> list[Group]:
    """Return the smaller side; both if none of them leads. ``lead``: size of the first minus that of the second."""
    return (second if lead > 0 else first) if lead else [*first, *second]


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
