"""One lighthouse without its server: its term, its jobs, and their sessions.

Its duties, in order (``job.py`` has those of one event): begin a term, which raises the epoch before any worker gets
a Welcome; load every job of the store. When the term ends, for any reason: send nothing more, close all sessions,
read the store again, begin the next term. If several lighthouses share a store, a term begins when this one wins the
election; until then it follows the leader and redirects workers to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
import uuid
from http import HTTPStatus
from typing import Any, TypeVar

from keepstep_lighthouse.jobs import records
from keepstep_lighthouse.jobs.event_log import EventLog
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.job_endings import JobEndings
from keepstep_lighthouse.jobs.port_probes import PortProbes
from keepstep_lighthouse.jobs.repeated_frames import RepeatedFrames
from keepstep_lighthouse.jobs.sessions import Session
from keepstep_lighthouse.jobs.welcomed import Welcomed
from keepstep_lighthouse.leadership.campaign import Leadership
from keepstep_lighthouse.leadership.election import Leader
from keepstep_lighthouse.leadership.leader_link import FollowerLinks, LeaderLink
from keepstep_lighthouse.leadership.nodes import Nodes
from keepstep_lighthouse.leadership.term import STORE_TIMEOUT, Term, TermOverError
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.registry.service_registry import Registry
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_lighthouse.store.contract import Store, StoreError
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net import websocket
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import Hello, Services
from keepstep_mesh.protocol.policy import Policy, policy_changes

T = TypeVar("T")

HIGHEST_EPOCH_SEEN = 2**20
"""A hello with a higher one is invalid, unless this lighthouse has reached it. Far below the highest epoch whose events
have exact ids (2**21), so that lighthouses can take over after a wrong report, and the groups accept them.
"""
ELECTION_SECONDS = 2.0
ALONE_SECONDS = 1.0
"""Time that workers have to connect to a new leader."""
TERM_BACKOFF = Backoff(first=0.1, most=5.0)

TRY_STORE_SECONDS = 5.0
TRIED_KEY = "tried"

log = get_logger("keepstep.lighthouse")


class BadMessages:
    """Counts the sessions that broke the protocol, and logs some of them."""

    def __init__(self) -> None:
        self.total = 0
        self._logged = LogLimiter(seconds=1.0)  # of all jobs together: a client can invent any number of job names

    def add(self, job: str, replica_id: str, reason: str) -> None:
        self.total += 1
        if self._logged.allows(time.monotonic()):
            log.warning("bad message", job=job, replica_id=replica_id, reason=reason, bad_messages=self.total)


class LighthouseNode:
    """One lighthouse.

    Open ``store`` and ``events`` before ``keep_term`` (a store of its own) or ``stand_by`` (a shared one).
    """

    def __init__(self, settings: LighthouseSettings, store: Store, events: EventLog) -> None:
        self.settings = settings
        self.jobs: dict[str, Job] = {}
        self.sessions: dict[int, Session] = {}
        self.events = events
        self.term: Term | None = None
        """None: this lighthouse may not decide now; ``trouble`` has the reason."""
        self.trouble: str | None = "the lighthouse is starting"
        self.bad_messages = BadMessages()
        self.serving = False
        """False while it stops: tasks that wait must end."""
        self.leadership: Leadership | None = None
        """None: this lighthouse is the only one."""
        self.node = uuid.uuid4().hex
        """Name of this process."""
        self.nodes: Nodes | None = None
        """The lighthouses of a shared store."""
        self.registry = Registry(self._tell_services)
        self.followers = FollowerLinks(self._offered_elsewhere)
        self.endings = JobEndings(self)
        self.ports = PortProbes()
        self.store = store
        self.store_trouble: str | None = None
        """Why the store refused the last write of ``try_store``; None: it did not."""
        self._frames = RepeatedFrames()
        self._numbers = itertools.count(1)
        self._welcomed = Welcomed()
        """Of this term."""
        self._policy_warned: set[str] = set()
        """Jobs whose stored policy differs from the one in the settings, and for which that was logged."""
        self._writes: set[asyncio.Task[Any]] = set()
        """Running writes, awaited at the end of the term."""
        self._over = asyncio.Event()
        self._led_since = 0.0
        self._settled = asyncio.Event()
        """Set while the leader is known."""
        self._alone_since = 0.0
        """When a follower was first offered a session while this leader had none; 0: not so."""

    # ---- terms

    def leading(self) -> Term:
        """Return the term. Raise ``Problem`` 503 without one."""
        if self.term is None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, self.not_ready() or "the lighthouse is not ready")
        return self.term

    def not_ready(self) -> str | None:
        """Return why this lighthouse cannot do its work; None: it can. It cannot without writes to the store."""
        doubt = None if self.leadership is None else self.leadership.doubt
        follows = self.leadership is not None and self.leadership.leader is not None
        return doubt or (None if self.term is not None or follows else self.trouble) or self.write_trouble

    @property
    def write_trouble(self) -> str | None:
        """Why the store accepts no writes; None: it does."""
        return (None if self.term is None else self.term.trouble) or self.store_trouble

    async def try_store(self) -> None:
        """Write to the store from time to time, until cancelled: a job that writes nothing does not notice a fault."""
        while True:
            await asyncio.sleep(TRY_STORE_SECONDS)
            try:
                async with asyncio.timeout(STORE_TIMEOUT):
                    await self.store.put(TRIED_KEY, b"%d" % time.time())
            except (StoreError, TimeoutError) as error:
                reason = f"the store accepts no writes: {str(error) or 'it does not answer'}"
                if self.store_trouble is None:
                    log.error("store fails", reason=reason)
                self.store_trouble = reason
            else:
                self.store_trouble = None

    async def stand_by(self, address: str, link: LeaderLink) -> None:
        """Lead when the election is won, follow otherwise. ``address``: where others reach this lighthouse."""
        self.nodes = Nodes(self.store, self.node, address, self.settings.lease)
        leadership = self.leadership = Leadership(
            self.store,
            self.node,
            address,
            self.settings.lease,
            link,
            self._term_is_over,
            self._another_leads,
        )
        running = asyncio.create_task(leadership.run(), name="keepstep lighthouse election")
        on_record = asyncio.create_task(self.nodes.run(), name="keepstep lighthouse nodes")
        try:
            while True:
                self._over.clear()
                term = await leadership.term()
                try:
                    await self._begin(term)
                except Exception as error:
                    # This task must not end: without it, this lighthouse never leads again. Others go first.
                    if not isinstance(error, StoreError | TimeoutError):
                        log.exception("fault at the beginning of a term")
                    silent = "the store does not answer" if isinstance(error, TimeoutError) else repr(error)
                    reason = str(error) or silent
                    leadership.give_up(f"cannot load the jobs: {reason}", stand_back=True)
                await self._over.wait()
                reason = self.trouble or "the last term is over"
                leadership.give_up(reason)
                await self._end_term(reason)
                await leadership.release()
        finally:
            reason = "the lighthouse is stopping"
            leadership.give_up(reason)
            await self._end_term(reason)
            await leadership.release()
            await cancelled(running)
            await cancelled(on_record)

    async def keep_term(self) -> None:
        """Begin the next term whenever one ends."""
        try:
            await self._next_terms()
        finally:
            await self._end_term("the lighthouse is stopping")

    async def _next_terms(self) -> None:
        while True:
            await self._over.wait()
            await self._end_term(self.trouble or "the last term is over")
            failures, limiter = 0, LogLimiter()
            while self.term is None:
                try:
                    await self.begin_term()
                except (StoreError, TimeoutError) as error:
                    self.trouble = f"cannot begin a term: {str(error) or 'the store does not answer'}"
                    failures += 1
                    pause = TERM_BACKOFF.seconds(failures)
                    if limiter.allows(time.monotonic()):
                        log.error("cannot begin a term; retrying", reason=self.trouble)
                    await asyncio.sleep(pause)

    async def begin_term(self) -> None:
        async with asyncio.timeout(STORE_TIMEOUT):
            term = await Term.begin(self.store)
        self._over.clear()
        await self._begin(term)

    async def _begin(self, term: Term) -> None:
        """Load the jobs of the store, unless the term ends in the meantime."""
        async with asyncio.timeout(STORE_TIMEOUT):
            stored = await self.store.get_prefix(records.JOB_PREFIX)
            floor = await self.store.get(records.FLOOR_KEY)
        found = {key: records.decode(key, value) for key, value in stored.items()}
        if self._over.is_set():
            return
        self.events.begin_epoch(term.epoch)
        self._welcomed = Welcomed()
        self.registry.term_begins()
        self.endings.term_begins(floor)
        jobs = {key.removeprefix(records.JOB_PREFIX) for key in found}
        self.events.forget_others(jobs)
        self._policy_warned &= jobs
        self.term, self.trouble, self._led_since = term, None, time.monotonic()
        for key, record in found.items():
            name = key.removeprefix(records.JOB_PREFIX)
            self._add_job(name, term, stored[key], record)
            self._warn_stored_policy_differs(name, record.policy)
        self._settled.set()
        log.info("term began", epoch=term.epoch, jobs=len(found), store=self.settings.store.partition("://")[0])

    def _warn_stored_policy_differs(self, job: str, policy: Policy) -> None:
        names = policy_changes(self.settings.policy, policy)
        if names and job not in self._policy_warned:
            self._policy_warned.add(job)
            log.warning(
                "stored policy differs from the settings and is kept",
                job=job,
                keeps={name: getattr(policy, name) for name in names},
                for_new_jobs={name: getattr(self.settings.policy, name) for name in names},
                to_change_it=f"keepstep policy {job} " + " ".join(f"--{name.replace('_', '-')} ..." for name in names),
            )

    def _add_job(self, name: str, term: Term, stored: bytes | None, record: JobRecord) -> Job:
        job = self.jobs[name] = Job(name, stored, record, term, self.events, self.ports, self._term_is_over)
        return job

    def _term_is_over(self, reason: str) -> None:
        """Stop all jobs at once, at any point; the task of the term does the rest."""
        (log.error if self.serving else log.info)("term over", reason=reason)
        self.term, self.trouble = None, f"the last term is over: {reason}"
        self._settled.clear()
        for job in self.jobs.values():
            job.end()
        self._over.set()

    async def _end_term(self, reason: str) -> None:
        self.term, self.trouble = None, reason
        for job in self.jobs.values():
            job.end()
            self._writes.update(job.writing())
        self.jobs.clear()
        for session in self.sessions.values():
            session.end(reason, websocket.CLOSE_GOING_AWAY)
        self.followers.close(reason)
        while self._writes:
            done, _ = await asyncio.wait(self._writes)
            self._writes -= done

    # ---- other lighthouses

    def _another_leads(self, leader: Leader | None) -> None:
        if leader is not None:
            self.trouble = f"{leader.address} leads"
            self._settled.set()
        elif self.term is None:
            self.trouble = "no leader yet: the election is not over"
            self._settled.clear()

    async def leader_elsewhere(self) -> str | None:
        """Wait for the end of an election, up to ``ELECTION_SECONDS``.

        Returns:
            The address of the leader if it is another lighthouse; None: this one leads, or no lighthouse does.
        """
        if self.leadership is not None and self.term is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ELECTION_SECONDS):
                    await self._settled.wait()
        leader = self.leadership.leader if self.leadership is not None and self.term is None else None
        return None if leader is None else leader.address

    def _offered_elsewhere(self) -> None:
        """A follower was offered sessions. A leader without any session steps down: no worker reaches it."""
        if self.leadership is None or self.term is None:
            return
        now = time.monotonic()
        if self.sessions or not self._alone_since:
            self._alone_since = 0.0 if self.sessions else now
        elif now - max(self._led_since, self._alone_since) > ALONE_SECONDS:
            self._alone_since = 0.0
            self.leadership.give_up("workers reach another lighthouse, but not this one", stand_back=True)

    # ---- sessions

    def new_session(self, job: str) -> Session:
        """Return a session; accept it, then pass it to ``add_session``."""
        return Session(
            next(self._numbers),
            job,
            on_hello=self._greeted,
            on_bad=self._bad,
            on_end=self._ended,
            decode=self._frames.decode,
            services=self.registry.addresses,
        )

    def add_session(self, session: Session) -> None:
        self.sessions[session.number] = session
        self._alone_since = 0.0

    def _greeted(self, session: Session, hello: Hello) -> None:
        term = self.term
        if term is None and self.leadership is not None and (leader := self.leadership.leader) is not None:
            self.leadership.offered()
            session.redirect(leader.address)
        elif term is None:
            session.refuse("not_ready", self.trouble or "the lighthouse is not ready")
        elif hello.epoch_seen > max(HIGHEST_EPOCH_SEEN, term.epoch):
            self._bad(session, f"invalid epoch {hello.epoch_seen} (limit {HIGHEST_EPOCH_SEEN}); restart this group")
        elif hello.epoch_seen < term.epoch or (
            hello.epoch_seen == term.epoch and (session.job, session.replica_id) in self._welcomed
        ):
            self._open(session, hello)
        else:
            # The group has its epoch from a leader that is not in our store: the store was restored, or is new.
            self.owned(asyncio.create_task(self._raise_epoch(term, session, hello)))

    def owned(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """Register a task that writes: the end of the term waits for it."""
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    def term_failed(self, term: Term, reason: str) -> None:
        """A write under ``term`` failed, or its outcome is unknown."""
        if self.term is term:
            self._term_is_over(reason)

    async def _raise_epoch(self, term: Term, session: Session, hello: Hello) -> None:
        is_raised = False
        try:
            is_raised = await term.raise_epoch(hello.epoch_seen)
        except TermOverError as error:
            self.term_failed(term, str(error))
        if self.term is not term:
            session.refuse("not_ready", self.trouble or "the lighthouse began another term; retry")
            return
        if is_raised:
            log.warning("epoch raised", epoch=term.epoch, replica_id=session.replica_id, seen=hello.epoch_seen)
            self.events.begin_epoch(term.epoch)
            self._welcomed.epoch_raised()
        if not session.ending:
            self._open(session, hello)

    def _open(self, session: Session, hello: Hello, *, may_make_room: bool = True) -> None:
        if (refusal := self.endings.refusal(session.job, session.replica_id)) is not None:
            session.refuse("banned", refusal)
            return
        job = self.jobs.get(session.job)
        if job is None:
            if self.term is None:
                session.refuse("not_ready", self.trouble or "the lighthouse is not ready")
                return
            if len(self.jobs) >= self.settings.max_jobs:
                if may_make_room:
                    self.owned(asyncio.create_task(self._open_in_room_made(session, hello)))
                else:
                    session.refuse("not_ready", _no_room(session.job, self.settings.max_jobs))
                return
            floor = self.endings.floor
            record = JobRecord(quorum_id=floor, policy=self.settings.policy, first_quorum_id=floor)
            job = self._add_job(session.job, self.term, None, record)
        self._welcomed.begin(session.number, (session.job, session.replica_id))
        job.open(session, hello)
        session.begin(job)

    async def _open_in_room_made(self, session: Session, hello: Hello) -> None:
        with contextlib.suppress(TermOverError):  # without a term, ``_open`` refuses the session
            await self.endings.make_room(session.job, self.settings.max_jobs)
        if not session.ending:
            self._open(session, hello, may_make_room=False)

    def metrics_address(self) -> str | None:
        return next((one.address for one in self.registry.addresses() if one.service == "metrics"), None)

    def _tell_services(self) -> None:
        frame = codec.encode(Services(self.registry.addresses()))
        for session in self.sessions.values():
            session.tell_services(frame)

    def _bad(self, session: Session, reason: str) -> None:
        self.bad_messages.add(session.job, session.replica_id, reason)
        session.refuse("bad_message", reason)

    def _ended(self, session: Session) -> None:
        self.sessions.pop(session.number, None)
        self._welcomed.end(session.number)
        job = self.jobs.get(session.job)
        if job is not None:
            if job.remove(session.number) is not None:
                job.used_at = time.monotonic()
            if job.unused:
                job.end()
                del self.jobs[session.job]
                self.events.forget(session.job)
            elif not job.sessions:
                self.endings.wake()


def _no_room(job: str, limit: int) -> str:
    return (
        f"job {job!r} cannot be created: the limit of {limit} jobs is reached; delete those that are no longer "
        f"needed (keepstep jobs shows them, keepstep job rm JOB deletes one), or raise the limit (--max-jobs)"
    )
