"""One lighthouse: its store, its term, its jobs, the sessions of all of them, and the server in front.

The duties of a life, in their order (those of one event stand in ``jobs.py``): open the store; begin a term, which
raises the epoch before anybody is welcomed; take up every job that the store knows; listen. When the term is over, for
whatever reason: say nothing more, close all sessions, read the store again, begin the next term. Where several
lighthouses share a store, listening comes first, and a term begins when the election gives one: till then this one
follows, answers what it can, and sends workers to the leader.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import urlsplit

from aiohttp import web

from keepstep_lighthouse import admin, metrics, records
from keepstep_lighthouse.election import Leader
from keepstep_lighthouse.event_log import EventLog, FiledEventLog
from keepstep_lighthouse.events import JobRecord, Opened, Policy
from keepstep_lighthouse.following import pass_on
from keepstep_lighthouse.jobs import Job
from keepstep_lighthouse.leader_link import PATH as LINK_PATH
from keepstep_lighthouse.leader_link import FollowerLinks, LeaderLink
from keepstep_lighthouse.leadership import Leadership
from keepstep_lighthouse.nodes import Nodes
from keepstep_lighthouse.policies import policy_changes
from keepstep_lighthouse.registry import Registry
from keepstep_lighthouse.sessions import Session
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_lighthouse.store import Store, StoreError, open_store
from keepstep_lighthouse.term import STORE_TIMEOUT, Term, TermOverError
from keepstep_mesh import codec, websocket
from keepstep_mesh.addresses import in_url, outward_address
from keepstep_mesh.auth import Access
from keepstep_mesh.http import Handler, Identity, Problem, Route
from keepstep_mesh.logging import get_logger
from keepstep_mesh.messages import Hello, Services
from keepstep_mesh.reloading import FromFiles
from keepstep_mesh.service import Endpoint, Service, serving
from keepstep_mesh.settings import bind_address

MAX_JOBS = 1000
MAX_SESSIONS = 20_000
MAX_WELCOMED = 100_000
HIGHEST_EPOCH = 2**31
"""A hello that knows a higher one is broken, not ahead."""
JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ELECTION_SECONDS = 2.0
CLUSTER_PATH, OPENAPI_PATH = "/v1/cluster", "/openapi.json"
"""Every lighthouse answers these itself."""
ALONE_SECONDS = 1.0
"""Workers have so long to come to a new leader."""
TERM_RETRY_FIRST, TERM_RETRY_MOST = 0.1, 5.0

__all__ = ["Lighthouse", "LighthouseSettings"]

log = get_logger("keepstep.lighthouse")


class Lighthouse:
    """``start`` and ``stop`` run it within a loop that is there; ``service`` is for one that runs several."""

    def __init__(self, settings: LighthouseSettings) -> None:
        self.settings = settings
        self.jobs: dict[str, Job] = {}
        self.sessions: dict[int, Session] = {}
        self.events = EventLog()
        self.term: Term | None = None
        """None: nothing may be decided now; ``trouble`` says why."""
        self.trouble: str | None = "the lighthouse is starting"
        self.bad_messages = metrics.BadMessages()
        self.serving = False
        """False once it stops: who waits for something has to go."""
        self.leadership: Leadership | None = None
        """None where this lighthouse is the only one."""
        self.node = uuid.uuid4().hex
        """Names this process."""
        self.nodes: Nodes | None = None
        """The lighthouses of this store, where there may be several."""
        self.registry = Registry(self._tell_services)
        self.store: Store
        self._numbers = itertools.count(1)
        self._welcomed: set[tuple[str, str]] = set()
        """(job, replica_id) of those who have the epoch of this term from us."""
        self._said_to_keep: set[str] = set()
        """Jobs whose stored policy is not the one given here, which was logged."""
        self._writes: set[asyncio.Task[None]] = set()
        """Under way, and not to be left behind."""
        self._over = asyncio.Event()
        self._life: asyncio.Task[None] | None = None
        self._stopped = asyncio.Event()
        self._led_since = 0.0
        self.followers = FollowerLinks(self._offered_elsewhere)
        self._listening = asyncio.Event()
        self._settled = asyncio.Event()
        """It is known who leads."""
        self._endpoint: Endpoint | None = None
        self._link: LeaderLink
        self._alone_since = 0.0
        """When a follower was first offered a session since there was one here; 0: it was not, or there is one."""
        self._identity: Identity
        """For links to other lighthouses; ``_asker`` for what is passed on to them, without a token of ours."""
        self._asker: Identity

    # ---- life

    async def start(self) -> None:
        """Listens when it returns. Raises ``StoreError``, ``BindError``, ``AuthError`` or ``ValueError``."""
        listens: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live(listens), name="keepstep lighthouse")
        try:
            self._endpoint = await listens
        except BaseException:
            await _cancelled(self._life)
            raise

    async def _live(self, listens: asyncio.Future[Endpoint]) -> None:
        """A task of its own: who starts and who stops may be different tasks."""
        tokens, insecure = self.settings.tokens, self.settings.insecure
        try:
            host, port = bind_address(self.settings.bind)
            tls = self.settings.tls
            async with serving(self.service(), host, port, tokens=tokens, tls=tls, insecure=insecure) as endpoint:
                listens.set_result(endpoint)
                await self._stopped.wait()
        except Exception as error:
            if listens.done():
                raise
            listens.set_exception(error)

    async def stop(self) -> None:
        """Harmless when it was not started, or stopped before."""
        self._stopped.set()
        if self._life is not None:
            await self._life

    @property
    def address(self) -> str:
        """``http://host:port``, with the real port; ``https`` with TLS."""
        if self._endpoint is None:
            raise RuntimeError("the lighthouse is not started; await start() first")
        return self._endpoint.url

    def routes(self) -> list[Route]:
        session = Route("GET", "/v1/jobs/{job}/session", self._session, Access.WORKER, "a worker's WebSocket session")
        link = Route("GET", LINK_PATH, self._followed, Access.SERVICE, "another lighthouse's link to this leader")
        return [session, link, *(replace(one, handler=self._led(one.handler)) for one in admin.routes(self))]

    def service(self) -> Service:
        return Service(
            name="lighthouse",
            routes=self.routes(),
            lifespan=self._lifespan,
            not_ready=self.not_ready,
            listening=self._listens,
            registry=metrics.registry(self),
        )

    @contextlib.asynccontextmanager
    async def _lifespan(self) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            self.store = await open_store(self.settings.store)
            stack.push_async_callback(self.store.close)
            await stack.enter_async_context(self.registry.following(self.store))
            if self.settings.event_log is not None:
                self.events = await FiledEventLog.open(self.settings.event_log)
            stack.push_async_callback(self.events.close)
            if self.store.exclusive:
                await self._begin_term()
            else:
                self._identity = Identity(self._token_for_leader, self.settings.peer_tls)
                self._asker = Identity(None, self.settings.peer_tls)
            keep = self._keep_term if self.store.exclusive else self._stand_by
            keeper = asyncio.create_task(keep(), name="keepstep lighthouse term")
            self.serving = True
            try:
                yield
            finally:
                self.serving = False
                self.events.wake()
                await _cancelled(keeper)

    def _listens(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._listening.set()

    def not_ready(self) -> str | None:
        if self.leadership is None:
            return self.trouble
        if self.term is not None or self.leadership.leader is not None:
            return self.leadership.doubt
        return self.leadership.doubt or self.trouble

    def _reachable_address(self) -> str:
        host = urlsplit(self.address).hostname or ""
        if host not in ("0.0.0.0", "::"):  # noqa: S104 - compared, not bound
            return self.address
        return self.address.replace(in_url(host), outward_address())

    def _token_for_leader(self) -> str | None:
        tokens = self.settings.tokens
        return (tokens.value if isinstance(tokens, FromFiles) else tokens).for_services()

    async def _stand_by(self) -> None:
        """Leads whenever the election says so, and follows otherwise."""
        await self._listening.wait()
        address = self.settings.advertise or self._reachable_address()
        self.nodes = Nodes(self.store, self.node, address, self.settings.lease)
        self._link = LeaderLink(self._identity)
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
            await _cancelled(running)
            await _cancelled(on_record)

    async def _keep_term(self) -> None:
        """Begins the next term whenever one is over."""
        try:
            await self._next_terms()
        finally:
            await self._end_term("the lighthouse is stopping")

    async def _next_terms(self) -> None:
        while True:
            await self._over.wait()
            await self._end_term(self.trouble or "the last term is over")
            pause = TERM_RETRY_FIRST
            while self.term is None:
                try:
                    await self._begin_term()
                except (StoreError, TimeoutError) as error:
                    self.trouble = f"the store does not let a term begin: {str(error) or 'it does not answer'}"
                    log.error("no term", reason=self.trouble, again_in_seconds=pause)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, TERM_RETRY_MOST)

    async def _begin_term(self) -> None:
        async with asyncio.timeout(STORE_TIMEOUT):
            term = await Term.begin(self.store)
        self._over.clear()
        await self._begin(term)

    async def _begin(self, term: Term) -> None:
        """Takes up the jobs of the store, unless the term is over by then."""
        async with asyncio.timeout(STORE_TIMEOUT):
            stored = await self.store.get_prefix(records.JOB_PREFIX)
        found = {key: records.decode(key, value) for key, value in stored.items()}
        if self._over.is_set():
            return
        self.events.begin_epoch(term.epoch)
        self._welcomed.clear()
        self.registry.term_begins()
        self.term, self.trouble, self._led_since = term, None, time.monotonic()
        for key, record in found.items():
            name = key.removeprefix(records.JOB_PREFIX)
            self._add_job(name, term, stored[key], record)
            self._say_that_it_keeps_its_policy(name, record.policy)
        self._settled.set()
        log.info("term began", epoch=term.epoch, jobs=len(found), store=self.settings.store.partition("://")[0])

    def _say_that_it_keeps_its_policy(self, job: str, policy: Policy) -> None:
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

    def leading(self) -> Term:
        """The term. Raises ``Problem`` 503 while there is none."""
        if self.term is None:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, self.not_ready() or "the lighthouse is not ready")
        return self.term

    # ---- other lighthouses

    def _another_leads(self, leader: Leader | None) -> None:
        if leader is not None:
            self.trouble = f"{leader.address} leads"
            self._settled.set()
        elif self.term is None:
            self.trouble = "the lighthouses are about to agree who leads"
            self._settled.clear()

    async def _election_over(self) -> None:
        """A worker that comes in the middle of an election is held for a moment rather than sent away."""
        if self.leadership is not None and self.term is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ELECTION_SECONDS):
                    await self._settled.wait()

    def _leader_elsewhere(self) -> str | None:
        """Address of the lighthouse that leads, if it is another."""
        leader = self.leadership.leader if self.leadership is not None and self.term is None else None
        return None if leader is None else leader.address

    def _led(self, handler: Handler) -> Handler:
        """What only the leader knows: a lighthouse that follows passes it on."""

        async def handle(request: web.Request) -> web.StreamResponse:
            if request.path not in (CLUSTER_PATH, OPENAPI_PATH):
                await self._election_over()
                if (leader := self._leader_elsewhere()) is not None:
                    return await pass_on(request, leader, self._asker)
            return await handler(request)

        return handle

    async def _followed(self, request: web.Request) -> web.StreamResponse:
        self.leading()
        return await self.followers.serve(request)

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

    async def _session(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["job"]
        if JOB_NAME.fullmatch(name) is None:
            raise Problem(
                HTTPStatus.BAD_REQUEST,
                f"{name!r} is no name of a job: up to 128 letters, digits, '.', '_' and '-', a letter or digit first",
            )
        await self._election_over()
        if self._leader_elsewhere() is None:
            self.leading()
        if len(self.sessions) >= MAX_SESSIONS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"this lighthouse holds its {MAX_SESSIONS} sessions")
        session = Session(
            next(self._numbers),
            name,
            on_hello=self._greeted,
            on_bad=self._bad,
            on_end=self._ended,
            services=self.registry.addresses,
        )
        response = await session.accept(request)
        self.sessions[session.number] = session
        self._alone_since = 0.0
        await session.ended()
        return response

    def _greeted(self, session: Session, hello: Hello) -> None:
        term = self.term
        if term is None and (leader := self._leader_elsewhere()) is not None:
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
            task = asyncio.create_task(self._raise_epoch(term, session, hello))
            self._writes.add(task)
            task.add_done_callback(self._writes.discard)

    async def _raise_epoch(self, term: Term, session: Session, hello: Hello) -> None:
        try:
            await term.raise_epoch(hello.epoch_seen)
        except TermOverError as error:
            if self.term is term:
                self._term_is_over(str(error))
        if self.term is not term:
            session.refuse("not_ready", self.trouble or "the lighthouse began another term; try again")
            return
        log.warning("epoch raised", epoch=term.epoch, replica_id=session.replica_id, seen=hello.epoch_seen)
        self.events.begin_epoch(term.epoch)
        if not session.ending:
            self._open(session, hello)

    def _open(self, session: Session, hello: Hello) -> None:
        job = self.jobs.get(session.job)
        if job is None:
            if self.term is None or len(self.jobs) >= MAX_JOBS:
                session.refuse("not_ready", f"this lighthouse keeps at most {MAX_JOBS} jobs")
                return
            job = self._add_job(session.job, self.term, None, JobRecord(policy=self.settings.policy))
        if len(self._welcomed) >= MAX_WELCOMED:
            self._welcomed.clear()
        self._welcomed.add((session.job, session.replica_id))
        job.open(session, Opened(session.number, session.replica_id, hello.quorum_id_seen, hello.held))
        session.begin(job)

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
            job.sessions.pop(session.number, None)
            if job.unused:
                job.end()
                del self.jobs[session.job]


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
