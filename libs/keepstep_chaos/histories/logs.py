"""Check the invariants within one log, line by line: the event log of a lighthouse, the step log of a process."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_chaos.histories.quorums import Quorums, named
from keepstep_chaos.histories.records import ANSWERED, FOLLOWING, EventRecord, Place, StepRecord
from keepstep_chaos.histories.rules import Violations
from keepstep_mesh.protocol.lineage import BEHIND


class EventLogCheck:
    """The event log of one lighthouse, across restarts, which begin new terms."""

    def __init__(self, name: str, violations: Violations) -> None:
        self.name = name
        self.owner = name
        """The process that leads in the current term; the name of the log until a line names it."""
        self.headless = False
        """Whether the first lines of the log are missing."""
        self._violations = violations
        self._last: tuple[EventRecord, Place] | None = None
        self._made: dict[str, tuple[int, Place]] = {}
        """The last quorum of each job."""

    def add(self, place: Place, record: EventRecord) -> None:
        first_of_epoch = record.epoch << 32
        if self._last is None:
            self.headless = record.id != first_of_epoch + 1
        else:
            last, where = self._last
            if record.epoch < last.epoch:
                what = f"epoch {record.epoch} after epoch {last.epoch}"
                self._violations.add("epoch_order", record.job, what, where, place)
            due = max(last.id, first_of_epoch) + 1
            if record.id != due:
                what = f"event {record.id} stands where event {due} should"
                self._violations.add("gap", record.job, what, where, place)
        self._last = record, place
        if record.kind == "term":
            self.owner = record.owner
        elif record.kind == "quorum" and record.quorum_id is not None:
            before = self._made.get(record.job)
            if before is not None and record.quorum_id <= before[0]:
                what = f"quorum {record.quorum_id} was made after quorum {before[0]}"
                self._violations.add("quorum_order", record.job, what, before[1], place)
            self._made[record.job] = record.quorum_id, place


@dataclass(slots=True)
class Run:
    """Consecutive steps that one process committed under one answer."""

    replica_id: str
    group_rank: int
    epoch: int
    quorum_id: int
    participants: int
    lineage: int | str
    """Lineage before the first step; before all others it is ``new_lineage``."""
    new_lineage: int | str
    first: int
    last: int
    first_place: Place
    last_place: Place
    forgotten_in: int | None = None
    """The quorum in which the process discarded the resulting state, for a checkpoint or because it broke, or after
    which it was no longer the job's, because the process took part behind.
    """

    def lineage_before(self, step: int) -> int | str:
        return self.lineage if step == self.first else self.new_lineage

    def places_of(self, step: int) -> tuple[Place, ...]:
        """Return the line of ``step``, or the first and last line of the run if ``step`` is between them."""
        known = {self.first: self.first_place, self.last: self.last_place}
        return (known[step],) if step in known else tuple(known.values())


class ProcessCheck:
    """One rank of one incarnation."""

    def __init__(self, job: str, replica_id: str, group_rank: int, quorums: Quorums, violations: Violations) -> None:
        self.replica_id = replica_id
        self.group_rank = group_rank
        self.headless = False
        self.runs: list[Run] = []
        """All runs before ``rolled_back``."""
        self.rolled_back: Place | None = None
        """The line that loads a checkpoint after a commit. Steps begin again there, and are not compared."""
        self.end: tuple[Place, StepRecord] | None = None
        """The line with which the process finished together with the others."""
        self._job = job
        self._quorums = quorums
        self._violations = violations
        self._n = 0
        self._last: Place | None = None
        self._epoch = self._quorum_id = 0
        self._answer: StepRecord | None = None
        """The current quorum of the process."""
        self._step: int | None = None
        self._lineage: int | str | None = None
        """None: unknown."""

    def add(self, place: Place, record: StepRecord) -> None:
        self._check_n(place, record)
        if record.event in ANSWERED and (record.quorum_id or record.event != "discarded"):
            self._check_answer(place, record)
        match record.event:
            case "quorum":
                self._joined(place, record)
            case "committed":
                self._committed(place, record)
            case "retried" | "discarded":
                pass
            case "finished":
                self.end = place, record
            case _:
                self._holds(place, record)
        self._last = place

    def _violated(self, rule: str, what: str, *places: Place | None) -> None:
        known = [place for place in places if place is not None]
        self._violations.add(rule, self._job, f"{self.replica_id} rank {self.group_rank} {what}", *known)

    def _check_n(self, place: Place, record: StepRecord) -> None:
        if self._last is None:
            self.headless = record.n != 1
        elif record.n != self._n + 1:
            self._violated("gap", f"has line {record.n} where line {self._n + 1} should stand", self._last, place)
            self._step = self._lineage = self._answer = None
        self._n = record.n

    def _check_answer(self, place: Place, record: StepRecord) -> None:
        if record.epoch < self._epoch:
            self._violated("epoch_order", f"goes on under epoch {record.epoch} after {self._epoch}", self._last, place)
        if record.quorum_id < self._quorum_id:
            what = f"is in quorum {record.quorum_id} after quorum {self._quorum_id}"
            self._violated("quorum_order", what, self._last, place)
        if (record.epoch, record.quorum_id) != (self._epoch, self._quorum_id):
            what = f"{self.replica_id} was in quorum {record.quorum_id}"
            self._quorums.acted(place, record.quorum_id, record.epoch, what)
        self._epoch, self._quorum_id = max(self._epoch, record.epoch), max(self._quorum_id, record.quorum_id)

    def _joined(self, place: Place, record: StepRecord) -> None:
        self._quorums.claim(place, record.quorum_id, record.members, self.replica_id)
        if self.replica_id not in record.members:
            self._violated("member", f"acts in quorum {record.quorum_id} of {named(record.members)}", place)
        self._answer = record

    def _holds(self, place: Place, record: StepRecord) -> None:
        """Record that the process now holds this state."""
        if record.event not in {"healed", *FOLLOWING} and self.runs:
            self.runs[-1].forgotten_in = self._quorum_id
            if record.event == "loaded" and self.rolled_back is None:
                self.rolled_back = place
        self._step, self._lineage = record.step, record.lineage

    def _committed(self, place: Place, record: StepRecord) -> None:
        answer = self._answer
        if answer is not None and (answer.epoch, answer.quorum_id) != (record.epoch, record.quorum_id):
            what = (
                f"commits step {record.step} under quorum {record.quorum_id} of epoch {record.epoch}, and is in quorum "
                f"{answer.quorum_id} of epoch {answer.epoch}"
            )
            self._violated("member", what, self._last, place)
        elif answer is None and not self.headless and self._step is not None:
            self._violated("member", f"commits step {record.step} and is in no quorum yet", place)
        if self._step is not None and record.step != self._step + 1 and not (record.behind and record.synchronized):
            self._violated("step_order", f"commits step {record.step} after step {self._step}", self._last, place)
        if self._lineage is not None and record.lineage != self._lineage:
            what = f"starts step {record.step} from a state of lineage {record.lineage!r}, and held {self._lineage!r}"
            self._violated("one_state", what, self._last, place)
        if record.behind and not record.synchronized and isinstance(record.new_lineage, int):
            what = f"took part behind in step {record.step}, and keeps the lineage {record.new_lineage} of others"
            self._violated("one_state", what, place)
        if not record.behind and self.rolled_back is None:
            self._append(place, record)
        elif self.runs and isinstance(record.new_lineage, str) and record.new_lineage.startswith(BEHIND):
            self.runs[-1].forgotten_in = self.runs[-1].forgotten_in or record.quorum_id
        self._step, self._lineage = record.step, record.new_lineage

    def _append(self, place: Place, record: StepRecord) -> None:
        run = self.runs[-1] if self.runs else None
        if (
            run is not None
            and (record.epoch, record.quorum_id, record.participants) == (run.epoch, run.quorum_id, run.participants)
            and (record.step, record.lineage, record.new_lineage) == (run.last + 1, run.new_lineage, run.new_lineage)
            and run.forgotten_in is None
        ):
            run.last, run.last_place = record.step, place
            return
        self.runs.append(
            Run(
                replica_id=self.replica_id,
                group_rank=self.group_rank,
                epoch=record.epoch,
                quorum_id=record.quorum_id,
                participants=record.participants,
                lineage=record.lineage,
                new_lineage=record.new_lineage,
                first=record.step,
                last=record.step,
                first_place=place,
                last_place=place,
            )
        )
