"""Check the invariants between all logs of one job, after they were read."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from keepstep_chaos.histories.logs import ProcessCheck, Run
from keepstep_chaos.histories.quorums import Quorums, named
from keepstep_chaos.histories.records import EventRecord, Place, StepRecord
from keepstep_chaos.histories.rules import Violations
from keepstep_mesh.protocol.lineage import origin, same_weights
from keepstep_mesh.protocol.names import name_of


@dataclass(frozen=True, slots=True)
class Facts:
    """Counts of one job, for the summary."""

    groups: int
    incarnations: int
    quorums: int
    epochs: int
    steps: int
    """Number of different committed steps."""
    steps_again: int
    """Number of steps that a later quorum committed again, because none of its members had them."""


class JobHistory:
    def __init__(self, name: str, violations: Violations) -> None:
        self.quorums = Quorums(name, violations)
        self._name = name
        self._violations = violations
        self._processes: dict[tuple[str, int], ProcessCheck] = {}
        self._evicted: list[tuple[EventRecord, Place]] = []
        self._readmitted: list[EventRecord] = []
        self._deleted: list[EventRecord] = []
        """Deletions of the job, which lift its evictions."""

    def process(self, replica_id: str, group_rank: int) -> ProcessCheck:
        key = replica_id, group_rank
        if key not in self._processes:
            self._processes[key] = ProcessCheck(self._name, *key, self.quorums, self._violations)
        return self._processes[key]

    @property
    def processes(self) -> list[ProcessCheck]:
        return list(self._processes.values())

    def add_event(self, place: Place, record: EventRecord) -> None:
        if record.kind == "quorum":
            self.quorums.made(place, record)
        elif record.kind == "job_deleted":
            self._deleted.append(record)
        elif record.quorum_id is not None:
            what = f"{record.replica_id} was {record.kind}" if record.replica_id else "the policy was changed"
            self.quorums.acted(place, record.quorum_id, record.epoch, what)
            if record.kind == "evicted":
                self._evicted.append((record, place))
            elif record.kind == "readmitted":
                self._readmitted.append(record)

    def check(self, owners: Mapping[int, str]) -> None:
        """Check all invariants between logs. ``owners``: process by epoch, as far as known."""
        self.quorums.check_epochs()
        for quorum_id, runs in sorted(self._runs_by_quorum().items()):
            self._check_members(quorum_id, runs)
            self._check_answers(quorum_id, runs, owners)
            self._check_once(quorum_id, runs)
        self._check_ends()
        self._check_evictions()

    def _violated(self, rule: str, what: str, *places: Place) -> None:
        self._violations.add(rule, self._name, what, *places)

    def _runs(self) -> Iterator[Run]:
        for process in self._processes.values():
            yield from process.runs

    def _runs_by_quorum(self) -> dict[int, list[Run]]:
        """Return the runs of each quorum, sorted by their first step."""
        found: dict[int, list[Run]] = {}
        for run in self._runs():
            found.setdefault(run.quorum_id, []).append(run)
        for runs in found.values():
            runs.sort(key=lambda run: run.first)
        return found

    def _check_members(self, quorum_id: int, runs: list[Run]) -> None:
        quorum = self.quorums.by_id[quorum_id]
        if quorum.members is None or quorum.claimed is None:
            return
        for run in runs:
            if run.replica_id not in quorum.members:
                what = f"{run.replica_id} commits step {run.first} under quorum {quorum_id} of {named(quorum.members)}"
                self._violated("member", what, quorum.claimed, run.first_place)
            if not 0 < run.participants <= len(quorum.members):
                what = (
                    f"{run.replica_id} counts {run.participants} participants in step {run.first} of quorum "
                    f"{quorum_id}, which has {len(quorum.members)} members"
                )
                self._violated("one_answer", what, quorum.claimed, run.first_place)

    def _check_answers(self, quorum_id: int, runs: list[Run], owners: Mapping[int, str]) -> None:
        """Compare each run with the one that reached the highest step so far; this finds every difference."""
        reach = runs[0]
        for run in runs[1:]:
            step = run.first
            if step <= reach.last:
                places = *reach.places_of(step), run.first_place
                if run.participants != reach.participants:
                    what = (
                        f"step {step} of quorum {quorum_id} has {reach.participants} participants for "
                        f"{reach.replica_id} and {run.participants} for {run.replica_id}"
                    )
                    self._violated("one_answer", what, *places)
                if run.epoch != reach.epoch and owners.get(run.epoch, "") != owners.get(reach.epoch, " "):
                    what = (
                        f"step {step} of quorum {quorum_id} was answered to {reach.replica_id} under epoch "
                        f"{reach.epoch} and to {run.replica_id} under epoch {run.epoch}"
                    )
                    self._violated("one_answer", what, *places)
                if run.lineage != reach.lineage_before(step):
                    what = (
                        f"step {step} of quorum {quorum_id} starts from lineage {reach.lineage_before(step)!r} at "
                        f"{reach.replica_id} and from {run.lineage!r} at {run.replica_id}"
                    )
                    self._violated("one_state", what, *places)
            if run.last > reach.last:
                reach = run

    def _check_once(self, quorum_id: int, runs: list[Run]) -> None:
        """Check that a quorum commits no step that one of its members had committed before.

        A member asks for a quorum with its step. A resume from a checkpoint since then permits lower steps.
        """
        first = runs[0]
        resumed = origin(first.lineage).resumed
        for replica_id in self.quorums.by_id[quorum_id].members or ():
            for held in self._held_before(replica_id, quorum_id):
                if first.first <= held.last and origin(held.new_lineage).resumed >= resumed:
                    what = (
                        f"step {first.first} was committed under quorum {quorum_id} by {first.replica_id}, though its "
                        f"member {replica_id} had committed up to step {held.last} under quorum {held.quorum_id}"
                    )
                    self._violated("one_quorum", what, held.last_place, first.first_place)

    def _held_before(self, replica_id: str, quorum_id: int) -> Iterator[Run]:
        """Yield the last run of each rank of ``replica_id`` before it asked for this quorum."""
        rank = 0
        while (process := self._processes.get((replica_id, rank))) is not None:
            rank += 1
            place = bisect_left(process.runs, quorum_id, key=lambda run: run.quorum_id)
            if place:
                run = process.runs[place - 1]
                if run.forgotten_in is None or run.forgotten_in >= quorum_id:
                    yield run

    def _check_ends(self) -> None:
        """Compare the states at which groups finished, for each time that the job was closed."""
        ends: dict[int, tuple[Place, StepRecord]] = {}
        for process in self._processes.values():
            if process.end is None:
                continue
            place, end = process.end
            where, first = ends.setdefault(end.closed_ms, process.end)
            if end.step != first.step or not same_weights(end.lineage, first.lineage):
                what = (
                    f"{end.replica_id} finished at step {end.step}, lineage {end.lineage!r}, and {first.replica_id} at "
                    f"step {first.step}, lineage {first.lineage!r}"
                )
                self._violated("one_end", what, where, place)

    def _check_evictions(self) -> None:
        for order, place in self._evicted:
            for replica_id in order.names:
                lifts = [one for one in self._readmitted if _names(one.replica_id, replica_id)] + self._deleted
                lifted = min((one.id for one in lifts if one.id > order.id), default=None)
                for quorum_id, quorum in self.quorums.by_id.items():
                    if quorum.made is None or replica_id not in (quorum.members or ()):
                        continue
                    made, where = quorum.made
                    if order.id < made.id and (lifted is None or made.id < lifted):
                        what = f"{replica_id} is in quorum {quorum_id}, and was evicted before"
                        self._violated("evicted", what, place, where)
                if lifted is None:
                    self._check_evicted_commits(replica_id, order.quorum_id or 0, place)

    def _check_evicted_commits(self, replica_id: str, last_quorum_id: int, place: Place) -> None:
        for run in self._runs():
            if run.replica_id == replica_id and run.quorum_id > last_quorum_id:
                what = (
                    f"{replica_id} commits step {run.first} under quorum {run.quorum_id}, and was evicted at quorum "
                    f"{last_quorum_id}"
                )
                self._violated("evicted", what, place, run.first_place)

    # ---- for the summary

    def facts(self) -> Facts:
        incarnations = {process.replica_id for process in self.processes}
        epochs = {run.epoch for run in self._runs()}
        for quorum in self.quorums.by_id.values():
            incarnations |= quorum.members or frozenset()
            epochs |= {quorum.made[0].epoch} if quorum.made else set()
        spans = sorted(
            (min(r.first for r in runs), max(r.last for r in runs)) for runs in self._runs_by_quorum().values()
        )
        steps, reach = 0, 0
        for first, last in spans:
            steps += max(0, last - max(first - 1, reach))
            reach = max(reach, last)
        return Facts(
            groups=len({name_of(one) for one in incarnations}),
            incarnations=len(incarnations),
            quorums=len(self.quorums.by_id),
            epochs=len(epochs),
            steps=steps,
            steps_again=sum(last - first + 1 for first, last in spans) - steps,
        )

    def not_covered(self, *, event_logs: bool, step_logs: bool) -> Iterator[str]:
        members: set[str] = set()
        for quorum in self.quorums.by_id.values():
            members |= quorum.members or frozenset()
        if step_logs and (silent := members - {process.replica_id for process in self.processes}):
            yield f"job {self._name}: no step log of {named(silent)}: their commits are unknown"
        unmade = sum(quorum.made is None for quorum in self.quorums.by_id.values())
        if event_logs and unmade:
            yield f"job {self._name}: {unmade} quorums are in no event log: their lighthouses are unknown"
        for process in self.processes:
            who = f"job {self._name}: {process.replica_id} rank {process.group_rank}"
            if process.headless:
                yield f"{who}: its step log begins in the middle"
            if process.rolled_back is not None:
                where = process.rolled_back
                yield f"{who} loaded a checkpoint after it had committed: its steps from {where} on are not compared"


def _names(target: str, replica_id: str) -> bool:
    return target in (replica_id, name_of(replica_id))
