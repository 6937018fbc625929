"""What one lighthouse decides by, without the server in front: its term, its jobs, the sessions of all of them.

The duties of a life, in their order (those of one event stand in ``job.py``): begin a term, which raises the epoch
before anybody is welcomed; take up every job that the store knows. When the term is over, for whatever reason: say
nothing more, close all sessions, read the store again, begin the next term. Where several lighthouses share a store, a
term begins when the election gives one: till then this one follows, and sends workers to the leader.
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
from keepstep_lighthouse.jobs.bad_messages import BadMessages
from keepstep_lighthouse.jobs.event_log import EventLog
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.jobs.job_endings import JobEndings
from keepstep_lighthouse.jobs.sessions import Session
from keepstep_lighthouse.leadership.campaign import Leadership
from keepstep_lighthouse.leadership.election import Leader
from keepstep_lighthouse.leadership.leader_link import FollowerLinks, LeaderLink
from keepstep_lighthouse.leadership.nodes import Nodes
from keepstep_lighthouse.leadership.term import STORE_TIMEOUT, Term, TermOverError
from keepstep_lighthouse.quorum.events import JobRecord, Opened, Policy
from keepstep_lighthouse.quorum.policies import policy_changes
from keepstep_lighthouse.registry.service_registry import Registry
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_lighthouse.store.contract import Store, StoreError
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net import websocket
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.messages import Hello, Services

T = TypeVar("T")

MAX_WELCOMED = 100_000
HIGHEST_EPOCH = 2**31
"""A hello that knows a higher one is broken, not ahead."""
ELECTION_SECONDS = 2.0
ALONE_SECONDS = 1.0
"""Workers have so long to come to a new leader."""
TERM_BACKOFF = Backoff(first=0.1, most=5.0)

log = get_logger("keepstep.lighthouse")


class LighthouseNode:
    """``store`` is set before ``keep_term`` (a store of its own) or ``stand_by`` (a shared one) runs."""

    def __init__(self, settings: LighthouseSettings) -> None:
        self.settings = settings
        self.jobs: dict[str, Job] = {}
        self.sessions: dict[int, Session] = {}
        self.events = EventLog()
        self.term: Term | None = None
        """None: nothing may be decided now; ``trouble`` says why."""
        self.trouble: str | None = "the lighthouse is starting"
        self.bad_messages = BadMessages()
        self.serving = False
        """False once it stops: who waits for something has to go."""
        self.leadership: Leadership | None = None
        """None where this lighthouse is the only one."""
        self.node = uuid.uuid4().hex
        """Names this process."""
        self.nodes: Nodes | None = None
        """The lighthouses of this store, where there may be several."""
        self.registry = Registry(self._tell_services)
        self.followers = FollowerLinks(self._offered_elsewhere)
        self.endings = JobEndings(self)
        self.store: Store
        self._numbers = itertools.count(1)
        self._welcomed: set[tuple[str, str]] = set()
        """(job, replica_id) of those who have the epoch of this term from us."""
        self._said_to_keep: set[str] = set()
        """Jobs whose stored policy is not the one given here, which was logged."""
        self._writes: set[asyncio.Task[Any]] = set()
        """Under way, and not to be left behind."""
        self._over = asyncio.Event()
        self._led_since = 0.0
        self._settled = asyncio.Event()
        """It is known who leads."""
        self._link: LeaderLink
        self._alone_since = 0.0
        """When a follower was first offered a session since there was one here; 0: it was not, or there is one."""

    # ---- terms

    def leading(self) -> Term:
        """The term. Raises ``Problem`` 503 while there is none."""
        if self.term is None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, self.not_ready() or "the lighthouse is not ready")
        return self.term

    def not_ready(self) -> str | None:
        if self.leadership is None:
            return self.trouble
        if self.term is not None or self.leadership.leader is not None:
            return self.leadership.doubt
        return self.leadership.doubt or self.trouble

    async def stand_by(self, address: str, link: LeaderLink) -> None:
        """Leads whenever the election says so, and follows otherwise. ``address``: where others reach this one."""
        self.nodes = Nodes(self.store, self.node, address, self.settings.lease)
        self._link = link
        leadership = self.leadership = Leadership(
            self.store,
            self.node,
            address,
            self.settings.lease,
            self._link,
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
                    # Whatever it is: without this task there is no leader here any more. Others go first.
                    if not isinstance(error, StoreError | TimeoutError):
                        log.exception("fault at the begin of a term")
                    silent = "the store does not answer" if isinstance(error, TimeoutError) else repr(error)
                    reason = str(error) or silent
                    leadership.give_up(f"the jobs cannot be taken up: {reason}", stand_back=True)
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
        """Begins the next term whenever one is over."""
        try:
            await self._next_terms()
        finally:
            await self._end_term("the lighthouse is stopping")

    async def _next_terms(self) -> None:
        while True:
            await self._over.wait()
            await self._end_term(self.trouble or "the last term is over")
            failures = 0
            while self.term is None:
                try:
                    await self.begin_term()
                except (StoreError, TimeoutError) as error:
                    self.trouble = f"the store does not let a term begin: {str(error) or 'it does not answer'}"
                    failures += 1
                    pause = TERM_BACKOFF.seconds(failures)
                    log.error("no term", reason=self.trouble, again_in_seconds=pause)
                    await asyncio.sleep(pause)

    async def begin_term(self) -> None:
        async with asyncio.timeout(STORE_TIMEOUT):
            term = await Term.begin(self.store)
        self._over.clear()
        await self._begin(term)

    async def _begin(self, term: Term) -> None:
        """Takes up the jobs of the store, unless the term is over by then."""
        async with asyncio.timeout(STORE_TIMEOUT):
            stored = await self.store.get_prefix(records.JOB_PREFIX)
            floor = await self.store.get(records.FLOOR_KEY)
        found = {key: records.decode(key, value) for key, value in stored.items()}
        if self._over.is_set():
            return
        self.events.begin_epoch(term.epoch)
        self._welcomed.clear()
        self.registry.term_begins()
        self.endings.term_begins(floor)
        self.events.forget_others({key.removeprefix(records.JOB_PREFIX) for key in found})
        self.term, self.trouble, self._led_since = term, None, time.monotonic()
        for key, record in found.items():
            name = key.removeprefix(records.JOB_PREFIX)
            self._add_job(name, term, stored[key], record)
            self._warn_stored_policy_differs(name, record.policy)
        self._settled.set()
        log.info("term began", epoch=term.epoch, jobs=len(found), store=self.settings.store.partition("://")[0])

    def _warn_stored_policy_differs(self, job: str, policy: Policy) -> None:
        names = policy_changes(self.settings.policy, policy)
        if names and job not in self._said_to_keep:
            self._said_to_keep.add(job)
            log.warning(
                "a stored job keeps its policy",
                job=job,
                keeps={name: getattr(policy, name) for name in names},
                for_new_jobs={name: getattr(self.settings.policy, name) for name in names},
                to_change_it=f"keepstep policy {job} " + " ".join(f"--{name.replace('_', '-')} ..." for name in names),
            )

    def _add_job(self, name: str, term: Term, stored: bytes | None, record: JobRecord) -> Job:
        job = self.jobs[name] = Job(name, stored, record, term, self.events, self._term_is_over)
        return job

    def _term_is_over(self, reason: str) -> None:
        """Called in the middle of anything: from here on nothing is said; the rest is the keeper's."""
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
            self.trouble = "the lighthouses are about to agree who leads"
            self._settled.clear()

    async def election_over(self) -> None:
        """A worker that comes in the middle of an election is held for a moment rather than sent away."""
        if self.leadership is not None and self.term is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ELECTION_SECONDS):
                    await self._settled.wait()

    def leader_elsewhere(self) -> str | None:
        """Address of the lighthouse that leads, if it is another."""
        leader = self.leadership.leader if self.leadership is not None and self.term is None else None
        return None if leader is None else leader.address

    def _offered_elsewhere(self) -> None:
        """A follower was offered sessions. If none of them is here, none of the workers reaches this leader."""
        if self.leadership is None or self.term is None:
            return
        now = time.monotonic()
        if self.sessions or not self._alone_since:
            self._alone_since = 0.0 if self.sessions else now
        elif now - max(self._led_since, self._alone_since) > ALONE_SECONDS:
            self._alone_since = 0.0
            self.leadership.give_up("no worker reaches this lighthouse, but another", stand_back=True)

    # ---- sessions

    def new_session(self, job: str) -> Session:
        """To be accepted, and then given to ``add_session``."""
        return Session(
            next(self._numbers),
            job,
            on_hello=self._greeted,
            on_bad=self._bad,
            on_end=self._ended,
            services=self.registry.addresses,
        )

    def add_session(self, session: Session) -> None:
        self.sessions[session.number] = session
        self._alone_since = 0.0

    def _greeted(self, session: Session, hello: Hello) -> None:
        term = self.term
        if term is None and (leader := self.leader_elsewhere()) is not None:
            self._link.offered()
            session.redirect(leader)
        elif term is None:
            session.refuse("not_ready", self.trouble or "the lighthouse is not ready")
        elif hello.epoch_seen > HIGHEST_EPOCH:
            self._bad(session, f"no lighthouse ever had epoch {hello.epoch_seen}")
        elif hello.epoch_seen < term.epoch or (session.job, session.replica_id) in self._welcomed:
            self._open(session, hello)
        else:
            # It met a leader that our store knows nothing of: the store was restored, or is new.
            self.owned(asyncio.create_task(self._raise_epoch(term, session, hello)))

    def owned(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        """``task``, which writes; the end of the term waits for it."""
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    def term_failed(self, term: Term, reason: str) -> None:
        """A write under ``term`` failed, or nobody knows what became of it."""
        if self.term is term:
            self._term_is_over(reason)

    async def _raise_epoch(self, term: Term, session: Session, hello: Hello) -> None:
        try:
            await term.raise_epoch(hello.epoch_seen)
        except TermOverError as error:
            self.term_failed(term, str(error))
        if self.term is not term:
            session.refuse("not_ready", self.trouble or "the lighthouse began another term; try again")
            return
        log.warning("epoch raised", epoch=term.epoch, replica_id=session.replica_id, seen=hello.epoch_seen)
        self.events.begin_epoch(term.epoch)
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
                if may_make_room and self.endings.expired():
                    self.owned(asyncio.create_task(self._open_after_expiry(session, hello)))
                else:
                    session.refuse("not_ready", _no_room(session.job, self.settings.max_jobs))
                return
            floor = self.endings.floor
            record = JobRecord(quorum_id=floor, policy=self.settings.policy, first_quorum_id=floor)
            job = self._add_job(session.job, self.term, None, record)
        if len(self._welcomed) >= MAX_WELCOMED:
            self._welcomed.clear()
        self._welcomed.add((session.job, session.replica_id))
        job.open(session, Opened(session.number, session.replica_id, hello.quorum_id_seen, hello.held))
        session.begin(job)

    async def _open_after_expiry(self, session: Session, hello: Hello) -> None:
        with contextlib.suppress(TermOverError):  # then there is no term, which ``_open`` says
            await self.endings.expire(at_most=1)
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
        job = self.jobs.get(session.job)
        if job is not None:
            if job.sessions.pop(session.number, None) is not None:
                job.used_at = time.monotonic()
            if job.unused:
                job.end()
                del self.jobs[session.job]
                self.events.forget(session.job)
            elif not job.sessions:
                self.endings.wake()


def _no_room(job: str, limit: int) -> str:
    return (
        f"job {job!r} cannot be created: this lighthouse holds its {limit} jobs; delete those that are no longer "
        f"needed (keepstep status shows them, keepstep job rm JOB), or raise the limit (--max-jobs)"
    )


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancels ``task`` and waits for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
