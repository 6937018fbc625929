"""Compare what groups report about their last steps. Pure.

**Collectives.** A collective needs every group of its quorum. A group that began more collectives in a step than
another group completed therefore waits for a collective that never comes, and its step fails after the timeout. Fewer
collectives prove nothing: a step that fails early ends before the others. A single difference may come from a group
that joins, whose script does not know the step of the others yet. Two in a row come from different scripts.

**Quantized collectives.** A collective that sends encoded values does not fit one that does not. Groups of which one
began only the former in a step and the other only the latter have different scripts, or settings.

**Values of optimizers.** Groups that step with other learning rates, or other values, have other weights from then on.
The values of most groups are right; of equally many, those of the group that connected first.

**Contributions that are not finite.** A NaN in one group makes the average NaN in all groups, so all of them contribute
NaNs from the next step on. Only the groups with the first one are named.

Reports are not stored. A lighthouse that takes over forgets them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from keepstep_mesh.protocol.membership import StepReport

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

    def __init__(self) -> None:
        self._completed: OrderedDict[tuple[int, int], Completed] = OrderedDict()
        """By (quorum_id, step)."""
        self._failed: dict[str, StepReport] = {}
        """The report of each group whose last step failed."""
        self._differed: set[str] = set()
        """Groups that began more or other collectives than others, and have not committed a step since."""
        self._valued: dict[tuple[int, int], None] = {}
        """Steps, by (quorum_id, step), in which the values of groups differ."""
        self._poisoned = (-1, -1)
        """The first and the last of the steps in a row whose weights follow from an average that was not finite."""

    def add(self, replica_id: str, report: StepReport) -> None:
        """Note a new report of a group."""
        if not report.committed:
            self._failed[replica_id] = report
            return
        if self._failed or self._differed:
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
                self._valued[key] = None

    def take_other_values(self) -> list[tuple[tuple[int, int], Completed]]:
        """Return the steps, by (quorum_id, step), in which values of groups differ, and forget that they do."""
        found, self._valued = self._valued, {}
        return [(key, self._completed[key]) for key in found if key in self._completed]

    def forget(self, replica_id: str) -> None:
        """Drop the failed steps of a group that is gone, or has committed a step."""
        self._failed.pop(replica_id, None)
        self._differed.discard(replica_id)

    def take_mismatch(self) -> Mismatch | None:
        """Return the first mismatch and forget it; None: all groups agree as far as known."""
        for report in self._failed.values():
            key = report.quorum_id, report.step
            completed = self._completed.get(key)
            if completed is not None and report.collectives > completed.collectives:
                began = {
                    replica_id: one.collectives
                    for replica_id, one in self._failed.items()
                    if (one.quorum_id, one.step) == key and one.collectives > completed.collectives
                }
                for replica_id in began:
                    del self._failed[replica_id]
                repeated = not self._differed.isdisjoint(began)
                self._differed.update(began)
                return Mismatch(report.quorum_id, report.step, completed, began, repeated)
        return None

    def take_mixture(self) -> Mixture | None:
        """Return the first mixture of encoded and plain collectives and forget it; None: none is known."""
        for report in self._failed.values():
            same = {
                replica_id: one
                for replica_id, one in self._failed.items()
                if (one.quorum_id, one.step) == (report.quorum_id, report.step) and one.collectives
            }
            encoded = sorted(replica_id for replica_id, one in same.items() if one.quantized == one.collectives)
            plain = sorted(replica_id for replica_id, one in same.items() if not one.quantized)
            if encoded and plain:
                both = {*encoded, *plain}
                for replica_id in both:
                    del self._failed[replica_id]
                repeated = not self._differed.isdisjoint(both)
                self._differed |= both
                return Mixture(report.step, tuple(encoded), tuple(plain), repeated)
        return None

    def went_back(self, step: int) -> None:
        """Note that the job goes on from ``step``: later steps come again, with other contributions."""
        first, last = self._poisoned
        self._poisoned = (first, min(last, step)) if step >= first else (-1, -1)

    def is_first_nonfinite(self, report: StepReport) -> bool:
        """Note a contribution that was not finite. Return False if it follows from one in an earlier step."""
        first, last = self._poisoned
        follows = first <= report.step <= last
        if report.committed and not first <= report.step_after <= last:
            self._poisoned = (first if follows else report.step_after), report.step_after
        return not follows
