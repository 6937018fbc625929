"""Note when the phases of a step happened, and turn them into spans at its end. Pure; times are monotonic seconds.

A step has one quorum, or several: after a heal before the forward pass, and in a retry. Each of them is a *try*, with
a span ``step`` of its own in the trace of its quorum; the phases are its children. The next try begins when its quorum
is requested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from keepstep_mesh.protocol.telemetry_records import StepRecord
from keepstep_mesh.telemetry.tracing.spans import QUORUM, STEP, AttributeValue, Span, SpanContext, span_of, trace_of

MAX_REASON = 500
"""Characters of an error."""
RECORD_FIELDS = tuple(one.name for one in dataclasses.fields(StepRecord) if one.name not in ("t", "values", "reason"))


@dataclass(frozen=True, slots=True)
class TracedRank:
    """The process whose steps these are."""

    job: str
    replica_id: str
    rank: int


@dataclass(slots=True)
class Phase:
    """A part of a try."""

    name: str
    began: float
    ended: float
    error: str
    facts: dict[str, AttributeValue]


@dataclass(slots=True)
class Try:
    """The course of a step under one quorum."""

    traced: TracedRank
    on_formed: Callable[[SpanContext], None]
    began: float
    """When the quorum was requested."""
    quorum_id: int = 0
    created_ms: int = 0
    """When the quorum was made, which tells apart those of two runs with the same quorum_id."""
    step: int = 0
    """Committed steps of the job before this one."""
    attempt: int = 0
    """Number of the group's request."""
    error: str = ""
    phases: list[Phase] = field(default_factory=list)

    def phase(self, name: str, began: float, ended: float, error: object = None, **facts: AttributeValue) -> None:
        """Note a phase. ``error``: what made it fail, or None."""
        self.phases.append(Phase(name, began, ended, _text(error), facts))

    def formed(self, quorum_id: int, created_ms: int, step: int, attempt: int, now: float) -> None:
        """Note the quorum, which has formed now."""
        self.created_ms, self.step, self.attempt, self.quorum_id = created_ms, step, attempt, quorum_id
        self.phase(QUORUM, self.began, now, quorum_id=quorum_id)
        self.on_formed(self.context(self.traced.rank))

    def context(self, rank: int) -> SpanContext:
        """Return the identity of the span of this try in a rank of the group."""
        traced = self.traced
        if not self.quorum_id:  # no quorum formed, so no other process has a part in it
            trace = trace_of(traced.job, traced.replica_id, rank, self.began)
        else:
            trace = trace_of(traced.job, self.created_ms, self.quorum_id, self.step)
        return span_of(trace, traced.replica_id, rank, self.attempt)


class StepTrace:
    """The tries of one step of this process.

    Args:
        traced: this process.
        on_formed: called with the span of a try as soon as its quorum has formed, from any thread.
    """

    def __init__(self, traced: TracedRank, on_formed: Callable[[SpanContext], None] = lambda _: None) -> None:
        self._traced = traced
        self._on_formed = on_formed
        self._tries: list[Try] = []

    def request(self, now: float) -> Try:
        """Begin a try: its quorum is requested."""
        self._tries.append(Try(self._traced, self._on_formed, now))
        return self._tries[-1]

    @property
    def present(self) -> Try:
        """The try whose quorum was requested last."""
        return self._tries[-1]

    def failed(self, error: object) -> None:
        """Note why the present try failed; another one follows."""
        if self._tries:
            self._tries[-1].error = _text(error)

    def spans(
        self, began: float, ended: float, record: StepRecord | None, wanted: frozenset[str], unix: float
    ) -> Iterator[Span]:
        """Return the spans of a step that has ended.

        Args:
            began: of the step.
            ended: of the step.
            record: of the step; None: it was neither committed nor discarded, because it served to heal.
            wanted: names of the spans.
            unix: Unix time minus monotonic time.
        """
        if not self._tries:
            self.request(began)
        rank, last = self._traced.rank, self._tries[-1]
        for number, one in enumerate(self._tries):
            since = one.began if number else began
            until = ended if one is last else max(since, self._tries[number + 1].began)
            context = one.context(rank)
            if STEP in wanted:
                yield Span(
                    name=STEP,
                    context=context,
                    parent=one.context(0) if rank and one.quorum_id else None,
                    began=since + unix,
                    ended=until + unix,
                    attributes=_facts(one, record if one is last else None),
                    error=(record.reason if record is not None and one is last else "") or one.error,
                )
            for place, phase in enumerate(one.phases):
                if phase.name in wanted:
                    start = max(phase.began, since)  # a viewer takes a child that begins before its parent for an error
                    yield Span(
                        name=phase.name,
                        context=span_of(context.trace_id, context.span_id, place, phase.name),
                        parent=context if STEP in wanted else None,
                        began=start + unix,
                        ended=max(phase.ended, start) + unix,
                        attributes=phase.facts,
                        error=phase.error,
                    )


def _facts(one: Try, record: StepRecord | None) -> dict[str, AttributeValue]:
    if record is None:
        return {"step": one.step, "quorum_id": one.quorum_id}
    facts = {name: value for name in RECORD_FIELDS if (value := getattr(record, name)) is not None}
    return {**facts, **{f"value.{name}": value for name, value in record.values.items()}}


def _text(error: object) -> str:
    text = f"{type(error).__name__}: {error}" if isinstance(error, Exception) else str(error or "")
    return text[:MAX_REASON]
