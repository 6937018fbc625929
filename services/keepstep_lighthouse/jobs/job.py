"""The shell around the state machine of one job. Its duties, in order:

1. Receive an event (a frame, an order, a timer) and pass it to the state machine, events in the order in which they
   happened.
2. Carry out the decisions in their order. After a ``Persist``, continue only when the write is known to have succeeded,
   with the rest of this event and with all later events.
3. Set one timer for the deadline of the state machine, once for all events that arrived together.

A decision without a write before it is carried out at once, in the call that received the event: a quorum round in
steady state has no task switch. A write that fails or whose outcome is unknown ends the term, and the decisions
after it are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from keepstep_lighthouse.incidents.joined_ends import NEVER, Incident, Incidents
from keepstep_lighthouse.incidents.judgement import Report
from keepstep_lighthouse.incidents.listing import KIND, IncidentView, listed
from keepstep_lighthouse.jobs import records
from keepstep_lighthouse.jobs.event_log import KEPT_PER_JOB, EventLog, Happened
from keepstep_lighthouse.jobs.expiry import JobUse
from keepstep_lighthouse.jobs.port_probes import PortProbes
from keepstep_lighthouse.jobs.replica_history import ReplicaHistory, StepRate
from keepstep_lighthouse.jobs.sessions import Session
from keepstep_lighthouse.leadership.term import Term, TermOverError
from keepstep_lighthouse.quorum.events import (
    Announce,
    Decision,
    EndSession,
    Event,
    FindPort,
    LogEntry,
    Opened,
    Persist,
    ProbePort,
    StacksOrdered,
    Tell,
    Tick,
)
from keepstep_lighthouse.quorum.groups.tally import DurationCounts
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.machine import JobCore
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import Hello, Quorum
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.records import copier
from keepstep_mesh.protocol.stack_messages import RankStacks

MIN_WAIT = 0.001
"""Resolution of an event loop's clock; a timer that fires too early would fire again and again."""

log = get_logger("keepstep.lighthouse")

LOUD = {
    "runtime_differs": log.warning,
    "values_differ": log.error,
    "went_back": log.warning,
    "port_misled": log.warning,
    "replicas_differ": log.error,
    "hung": log.error,
    "incident": log.warning,
}
"""How events are logged that are no routine."""
_answer_of = copier(Quorum, Announce, "epoch", "uniform", "listed")
STACKS_POLL_SECONDS = 0.05
LAPSED = "its lease is over by its own clock"

Step = Decision | Callable[[], None]
"""A decision, or a call that the shell makes between decisions."""


class Job:
    """``on_term_over`` is called once, when a write ended the term; the job is then inactive."""

    def __init__(
        self,
        name: str,
        stored: bytes | None,
        record: JobRecord,
        term: Term,
        events: EventLog,
        ports: PortProbes,
        on_term_over: Callable[[str], None],
    ) -> None:
        self.name = name
        self.term = term
        self.sessions: dict[int, Session] = {}
        self._connected: Counter[str] = Counter()
        """Number of sessions of each group, by name. A group that was restarted may have two for a while."""
        self.used_at = time.monotonic()
        """See ``expiry.JobUse``."""
        self.closed = False
        """The job is being deleted."""
        self.rounds = 0
        """Announced quorums, confirmed ones included."""
        self.steps = 0
        """Steps by which the job advanced under this lighthouse."""
        self.rate = StepRate()
        self.history = ReplicaHistory()
        self.healed_bytes = 0
        self.heals = DurationCounts()
        self.recoveries = DurationCounts()
        """Of a job whose model exists once."""
        self.commit_gaps = DurationCounts()
        """Times between the advances of the job under this lighthouse."""
        self._step: int | None = None
        """Step of the last announced quorum; None: none yet."""
        self._stored = stored
        self._written = record
        """The record as last written."""
        self._events = events
        self._ports = ports
        self._on_term_over = on_term_over
        self._outbox: deque[Step] = deque()
        self._carrying: asyncio.Task[None] | None = None
        """Not None while decisions wait for a write."""
        self._orders: set[asyncio.Future[list[Happened]]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._timer_is_stale = False
        self.incidents = Incidents(self.history.host_of)
        self.newest_incident = next(iter(self.listed_incidents()), None)
        """None: no group has ended without an order, as far as the event log reaches."""
        self.verdicts: Counter[str] = Counter()
        """Of incidents under this lighthouse."""
        self._incident_timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._over = False
        self.core = JobCore(
            name,
            record,
            time.monotonic(),
            time.time(),
            restarted=bool(record.members),
            fenced_until=term.fenced_until,
        )
        self._deadline_may_differ()

    # ---- 1. receive

    def handle(self, event: Event) -> None:
        self._process(event)

    def heard(self, session: int) -> None:
        self.core.heard(session, time.monotonic())

    def open(self, session: Session, hello: Hello) -> None:
        """Handle an accepted hello: write if necessary, send Welcome, then carry out the rest."""

        def welcomed(steps: list[Step]) -> list[Step]:
            if EndSession(session.number) not in steps:
                said = (place for place, one in enumerate(steps) if isinstance(one, Tell | Announce | EndSession))
                steps.insert(next(said, len(steps)), partial(self._welcome, session))
            return steps

        if self._over:
            why = f"job {self.name} is being deleted; try again" if self.closed else "the lighthouse begins a new term"
            session.refuse("not_ready", why)
            return
        self.sessions[session.number] = session
        self._connected[name_of(session.replica_id)] += 1
        facts = hello.quorum_id_seen, hello.held, hello.groups, session.host, hello.standby, session.local
        event = Opened(session.number, session.replica_id, *facts)
        self._process(event, welcomed)
        if session.number in self.sessions:
            self._compare_runtime(session.replica_id, hello)

    def remove(self, number: int) -> Session | None:
        """Remove a session and return it; None: it is removed already."""
        if (session := self.sessions.pop(number, None)) is not None:
            name = name_of(session.replica_id)
            self._connected[name] -= 1
            if not self._connected[name]:
                del self._connected[name]
        return session

    async def order(self, event: Event) -> list[Happened]:
        """Handle an administrator's order; return its entries of the event log once everything is written."""
        if self._over:
            raise TermOverError("the lighthouse begins a new term, or the job is being deleted; retry")
        self.used_at = time.monotonic()
        done: asyncio.Future[list[Happened]] = self._loop.create_future()
        made: list[Happened] = []

        def awaited(steps: list[Step]) -> list[Step]:
            logged = [partial(self._log, one, made) if isinstance(one, LogEntry) else one for one in steps]
            return [*logged, partial(_complete, done, made)]

        self._orders.add(done)
        done.add_done_callback(self._orders.discard)
        self._process(event, awaited)
        return await done

    async def stacks(self, target: str, seconds: float) -> dict[str, tuple[int, dict[int, RankStacks]]]:
        """Ask groups for their stacks, and return what arrives within ``seconds``: ``JobCore.stacks``."""
        self.handle(StacksOrdered(target))
        number, until = self.core.stack_request, time.monotonic() + seconds
        while True:
            found = self.core.stacks(target, number)
            if time.monotonic() >= until or all(len(known) >= world for world, known in found.values()):
                return found
            await asyncio.sleep(STACKS_POLL_SECONDS)  # an operator waits; the answers come within a second

    def report(self, report: Report) -> None:
        """A launcher reports the end of a group."""
        self._note(self.incidents.report(report, time.monotonic(), time.time()))

    def listed_incidents(self) -> list[IncidentView]:
        """Return the incidents of the event log, the newest first."""
        return listed(self._events.newest(self.name, KEPT_PER_JOB))

    def _process(self, event: Event, arranged: Callable[[list[Step]], list[Step]] | None = None) -> None:
        """``arranged`` inserts calls of the shell between the decisions; None: it inserts nothing."""
        if self._over:
            return
        if self.term.lapsed:
            self._fail(LAPSED)
            return
        try:
            steps: list[Step] = [*self.core.handle(event, time.monotonic(), time.time())]
            if arranged is not None:
                steps = arranged(steps)
            if steps:
                self._carry_out(steps)
        except Exception:
            # A fault of ours. A state that is half changed, or half told, decides no more: the store has the rest.
            log.exception("fault in a job", job=self.name, occasion=repr(event)[:500])
            self._fail(f"a fault in job {self.name}; the log has it")
        self._deadline_may_differ()

    # ---- 2. persist, then reply

    def _carry_out(self, decisions: list[Step]) -> None:
        if self._carrying is not None:
            self._outbox.extend(decisions)
            return
        for place, decision in enumerate(decisions):
            if type(decision) is Persist:
                self._outbox.extend(decisions[place:])
                self._carrying = asyncio.ensure_future(self._carry_out_outbox())
                return
            self._do(decision)

    async def _carry_out_outbox(self) -> None:
        try:
            while self._outbox:
                if self.term.lapsed:
                    raise TermOverError(LAPSED)
                decision = self._outbox.popleft()
                if type(decision) is Persist:
                    await self._write(decision.record)
                    continue
                if type(decision) is Announce:
                    self.core.answered(decision, time.monotonic())
                self._do(decision)
        except TermOverError as error:
            self._fail(str(error))
        except Exception:
            log.exception("fault in a job", job=self.name, occasion="after a write")
            self._fail(f"a fault in job {self.name}; the log has it")
        finally:
            self._carrying = None

    async def _write(self, record: JobRecord) -> None:
        value = records.encode(record)
        await self.term.replace(records.JOB_PREFIX + self.name, self._stored, value)
        before, self._stored, self._written = self._written, value, record
        if record.policy != before.policy:
            for session in self.sessions.values():
                session.tell_timing(record.policy)

    def _do(self, decision: Step) -> None:
        match decision:
            case Announce():
                self._announce(decision)
            case Tell(to, message):
                frame = codec.encode(message)
                for number in to:
                    if (session := self.sessions.get(number)) is not None:
                        session.send(frame)
            case EndSession(number):
                if (session := self.remove(number)) is not None:
                    session.end("ended by the lighthouse")
            case FindPort():
                self._ports.find(decision, self.handle)
            case ProbePort():
                self._ports.probe(decision, self.handle)
            case LogEntry():
                self._log(decision, [])
            case Persist():
                raise TypeError("Persist is handled by the writer")
            case _:
                decision()

    def _announce(self, announce: Announce) -> None:
        """Send the short answer to sessions that have the member list. Each of the two answers is packed once."""
        self.rounds += 1
        self._count_steps(announce.step)
        epoch, version = self.term.epoch, announce.version
        listed = (epoch, version) if announce.uniform else None
        short = full = None
        for number, request in announce.to:
            session = self.sessions.get(number)
            if session is None:
                continue
            if session.listed == listed and listed is not None:
                if short is None:
                    short = codec.answer_frames(_answer_of(announce, epoch, uniform=True, listed=()))
                session.send(short(request))
            else:
                if full is None:
                    whole = _answer_of(announce, epoch, uniform=False, listed=announce.members)
                    full = codec.answer_frames(whole)
                session.listed = (epoch, version)
                session.send(full(request))

    def _count_steps(self, step: int) -> None:
        """A quorum whose members have committed ``step`` is announced."""
        if self._step is not None and step > self._step:
            now = time.monotonic()
            self.steps += step - self._step
            if self.rate.committed_at is not None:
                self.commit_gaps.add(now - self.rate.committed_at)
            self.rate.add(step - self._step, now)
        self._step = step

    def _compare_runtime(self, replica_id: str, hello: Hello) -> None:
        """Warn about a group with other versions: its arithmetic may differ from that of the others."""
        self.history.arrived(replica_id, hello.host, hello.runtime)
        usual = self.history.unlike_others(replica_id, self._connected)
        if usual:
            self._log(LogEntry("runtime_differs", replica_id, {"runtime": hello.runtime, "others": usual}), [])

    def _welcome(self, session: Session) -> None:
        live_step = self.core.live_step(name_of(session.replica_id))
        session.welcome(self.term.epoch, self._written, live_step)

    def _log(self, entry: LogEntry, made: list[Happened]) -> None:
        made.append(self._events.add(self.name, entry.kind, entry.replica_id, entry.detail, time.time()))
        match entry.kind, entry.detail:
            case "world_formed", {"how": str(how), "seconds": int() | float() as seconds} if how != "fresh":
                self.recoveries.add(seconds)
            case "healed", {"bytes": int(size), "seconds": int() | float() as seconds}:
                self.healed_bytes += size
                self.heals.add(seconds)
        self.history.add(entry, time.monotonic())
        tell = LOUD.get(entry.kind, log.info)
        tell(entry.kind, job=self.name, replica_id=entry.replica_id, **entry.detail)
        stacks = self.core.last_stacks(entry.replica_id) if entry.kind == "lost" else ()
        facts = entry.kind, entry.replica_id, entry.detail, stacks
        self._note(self.incidents.note(*facts, time.monotonic(), time.time()))

    def _note(self, found: list[Incident]) -> None:
        """Log incidents, and set the timer for those that wait for their launcher."""
        for one in found:
            made: list[Happened] = []
            self._log(LogEntry(KIND, one.replica_id, one.detail), made)
            self._events.keep_private(made[0].id, one.log, one.stacks)
            self.verdicts[one.detail["verdict"]] += 1
            self.newest_incident = next(iter(self.listed_incidents()), None)
        if self._incident_timer is not None:
            self._incident_timer.cancel()
        due = self.incidents.deadline()
        if due < NEVER and not self._over:
            self._incident_timer = self._loop.call_later(max(MIN_WAIT, due - time.monotonic()), self._incidents_due)

    def _incidents_due(self) -> None:
        self._note(self.incidents.decide_due(time.monotonic()))

    # ---- 3. time

    def _deadline_may_differ(self) -> None:
        if not self._timer_is_stale:
            self._timer_is_stale = True
            self._loop.call_soon(self._set_timer)

    def _set_timer(self) -> None:
        """Set the timer. Firing too early is cheaper than setting it again for each event."""
        self._timer_is_stale = False
        if self._over:
            return
        due = self.core.deadline()
        if due is None or (self._timer is not None and self._timer_due <= due):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = self._loop.call_later(max(MIN_WAIT, due - time.monotonic()), self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(Tick())

    # ---- the end

    def _fail(self, reason: str) -> None:
        if not self._over:
            self.end()
            self._on_term_over(reason)

    def close(self) -> None:
        """Make the job inactive because it is about to be deleted."""
        self.closed = True
        self.end()

    def end(self) -> None:
        """Make the job inactive: no more decisions, no more messages."""
        self._over = True
        self._outbox.clear()
        for timer in (self._timer, self._incident_timer):
            if timer is not None:
                timer.cancel()
        for done in list(self._orders):
            if not done.done():
                done.set_exception(TermOverError("the outcome of the order is unknown; retry"))

    def writing(self) -> list[asyncio.Task[None]]:
        """Return tasks to await before the store is closed."""
        return [] if self._carrying is None else [self._carrying]

    @property
    def stored(self) -> bytes | None:
        """The stored record."""
        return self._stored

    @property
    def use(self) -> JobUse:
        awaited = self.closed or self.core.returning() is not None
        record = self.core.record
        over = record.closed is not None or (record.ended is not None and record.ended.code == "finished")
        return JobUse(self.name, record.policy.job_ttl, len(self.sessions), self.used_at, awaited, over)

    @property
    def unused(self) -> bool:
        """Whether the job has no session and no stored record."""
        return not self.sessions and self._stored is None and self._carrying is None


def _complete(done: asyncio.Future[list[Happened]], made: list[Happened]) -> None:
    if not done.done():
        done.set_result(made)
