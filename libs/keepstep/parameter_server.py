"""A parameter server: each client has a session, in which it and the server form a process group of two.

POST /new_session begins a session, and answers with its id. Both ends then connect through a table of the server's
HTTP port, as the members of a quorum do. Each session has a thread, a table, and a process group of its own, and Gloo
runs in a child process. So a client that dies, freezes, or sends garbage ends only its own session.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import uuid
from abc import ABC, abstractmethod
from http import HTTPStatus
from urllib.parse import urlsplit

import aiohttp
import torch
from aiohttp import web

from keepstep.group.group_listener import GroupListener
from keepstep.process_group import ProcessGroup, ProcessGroupBaby, ProcessGroupBabyGloo, ProcessGroupGloo
from keepstep.process_group.baby.children import Spawner
from keepstep.rendezvous.interruptible_store import UNKNOWN_VERSION
from keepstep.rendezvous.key_value_server import PATH, KeyValueServer, RendezvousError, Table, handle
from keepstep.rendezvous.store_client import RendezvousStore
from keepstep.runtime.devices import has_accelerator
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.addresses import outward_address
from keepstep_mesh.net.http import REQUEST_SECONDS, Problem, client_session, raise_for_problem, read_json_answer
from keepstep_mesh.security.tokens import ClientToken, is_loopback
from keepstep_mesh.threads.starting import Thread

log = get_logger("keepstep.parameter_server")

NEW_SESSION = "/new_session"
MAX_SESSIONS = 64
MAX_TABLE_BYTES = 4 << 20
"""Limit of what the two members of a session store at the rendezvous."""
MAX_ANSWER_BYTES = 4096
SERVER_RANK, CLIENT_RANK, MEMBERS = 0, 1, 2


class SessionRefused(KeepstepError):
    """The parameter server has as many sessions as it accepts, or shuts down. Try again later."""


class ParameterServer(ABC):
    """A server of parameters, to subclass. It serves from its construction, which may take seconds, until ``shutdown``.

    A session ends when ``forward`` returns or raises. An operation fails, and with it the session, when its client dies
    or does not answer within the timeout of the process group.

    Sessions may begin before the constructor of a subclass ends: call ``super().__init__`` last.

    Args:
        port: to serve on; 0: any free one.
        store_port: ignored; accepted for compatibility with torchft. The store is served at ``port``.
        hostname: address to serve on and to advertise. Default: that of the interface with the default route if
            KEEPSTEP_TOKEN is set, else 127.0.0.1.
        max_sessions: limit of sessions at a time. A client beyond it gets ``SessionRefused`` (HTTP status 503).
        isolate: run each session of a ``ProcessGroupGloo`` in a child process (``ProcessGroupBabyGloo``), because a
            tensor that is larger than expected ends the process that receives it. False saves about 0.2 ms for each
            operation; use it only if you trust all clients.

    Raises:
        TypeError: ``new_process_group`` returns no process group of keepstep.
        ValueError: ``port`` or ``max_sessions`` is out of range.
        OSError: the port is in use, or ``hostname`` is not an address of this machine.
        ProcessGroupError: the process that starts the child processes did not start.
    """

    def __init__(
        self,
        port: int,
        store_port: int = 0,  # noqa: ARG002
        *,
        hostname: str | None = None,
        max_sessions: int = MAX_SESSIONS,
        isolate: bool = True,
    ) -> None:
        if not 0 <= port <= 65535:
            raise ValueError(f"port={port} must be in [0, 65535]; 0 takes any free port")
        if max_sessions < 1:
            raise ValueError(f"max_sessions={max_sessions} must be at least 1")
        self._pid = os.getpid()
        self._max_sessions = max_sessions
        self._isolate = isolate
        self._lock = threading.Lock()
        self._sessions: dict[str, _Session] = {}
        self._closed = False
        self._device = torch.accelerator.current_device_index() if has_accelerator() else None
        token = ClientToken()
        host = hostname or (outward_address() if token else "127.0.0.1")
        routes = [web.post(NEW_SESSION, self._begin), web.post(PATH, self._rendezvous)]
        self._listener = GroupListener(host, port, token, routes)
        self._spawner = Spawner.shared() if isinstance(self._session_group(), ProcessGroupBaby) else None
        self._loop_thread = LoopThread("keepstep-parameter-server")
        try:
            if self._spawner is not None:
                self._spawner.fork().discard()  # wait for its start, so that no client has to
            self._base = self._loop_thread.call(self._listener.start(), CALL_MARGIN_SECONDS)
        except BaseException:
            self._stop()
            raise
        if not token and not is_loopback(host):
            log.warning("anyone who can connect may begin a session: set KEEPSTEP_TOKEN", address=self.address())
        atexit.register(self.shutdown)

    # ---- for subclasses

    @classmethod
    @abstractmethod
    def new_process_group(cls) -> ProcessGroup:
        """Return a new process group of keepstep that is not configured. Both ends of each session call this.

        The timeout of the process group limits the connection of a session, and each of its operations.
        """

    @abstractmethod
    def forward(self, session_id: str, pg: ProcessGroup) -> None:
        """Serve one client, in a thread of its own, until this returns. For several requests, loop here.

        Args:
            session_id: unique name of the session.
            pg: connected process group; the server is rank 0, the client rank 1.
        """

    # ---- the client

    @classmethod
    def new_session(cls, address: str) -> ProcessGroup:
        """Begin a session, from the process of a client. Call ``shutdown`` of the result to end it.

        Args:
            address: what ``address`` of the server returned.

        Returns:
            A connected process group; the server is rank 0, the client rank 1.

        Raises:
            SessionRefused: the server has too many sessions, or shuts down.
            TimeoutError: the server did not answer, or did not connect in time.
            KeepstepError: any other failure.
        """
        group = _new_group(cls)  # an error of it must not leave a session that waits for this client
        try:
            loop_thread = LoopThread("keepstep-new-session")
            try:
                session_id = loop_thread.call(_request_session(address), REQUEST_SECONDS + CALL_MARGIN_SECONDS)
            finally:
                loop_thread.stop()
            store = RendezvousStore(
                f"http://{urlsplit(address).netloc}", Table(session_id), token=ClientToken(), version=UNKNOWN_VERSION
            )
            try:
                _connect(group, store, session_id, CLIENT_RANK)
            finally:
                store.close()
        except BaseException:
            group.shutdown()
            raise
        return group

    # ---- the server

    def address(self) -> str:
        """Return the address for ``new_session``: ``http://host:port/new_session``."""
        return f"{self._base}{NEW_SESSION}"

    def shutdown(self) -> None:
        """End all sessions and stop to serve. May be called more than once, and by ``forward``.

        A ``forward`` that computes without end cannot be ended: after 10 s a warning names its session.
        """
        with self._lock:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            sessions = list(self._sessions.values())
        atexit.unregister(self.shutdown)
        try:
            self._loop_thread.call(self._listener.close(), CALL_MARGIN_SECONDS)
        finally:
            for session in sessions:
                session.abort("the parameter server was shut down")
            deadline = time.monotonic() + 10.0
            for session in sessions:
                if not session.joined(deadline):
                    log.warning("forward has not returned; its thread goes on", session=session.id)
            self._stop()

    def _stop(self) -> None:
        if self._spawner is not None:
            self._spawner.release()
        self._loop_thread.stop()

    async def _begin(self, _request: web.Request) -> web.Response:
        session = _Session(self._base)
        session.thread = Thread(
            target=self._serve, args=(session,), name=f"keepstep-session-{session.id[:8]}", daemon=True
        )
        with self._lock:
            if self._closed:
                return Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the parameter server shuts down").response()
            if len(self._sessions) >= self._max_sessions:
                detail = f"too many sessions (max_sessions={self._max_sessions}); try again when one has ended"
                return Problem(HTTPStatus.SERVICE_UNAVAILABLE, detail, retry_after=1.0).response()
            session.thread.start()
            self._sessions[session.id] = session
        return web.json_response({"session_id": session.id})

    async def _rendezvous(self, request: web.Request) -> web.Response:
        return await handle(request, self._tables)

    def _tables(self, table: Table) -> KeyValueServer:
        session = self._sessions.get(table.job)
        if session is None:
            raise RendezvousError("the session has ended, or never began; begin another one")
        return session.tables

    def _session_group(self) -> ProcessGroup:
        group = _new_group(type(self))
        if self._isolate and type(group) is ProcessGroupGloo:
            return ProcessGroupBabyGloo(group._timeout)  # noqa: SLF001  of this package
        return group

    def _serve(self, session: _Session) -> None:
        if self._device is not None:
            torch.accelerator.set_device_index(self._device)  # a new thread begins with device 0
        try:
            session.connect(self._session_group())
            log.info("session began", session=session.id)
            self.forward(session.id, session.group)
            log.info("session ended", session=session.id)
        except (KeepstepError, TimeoutError) as error:
            log.warning("session ended", session=session.id, reason=f"{type(error).__name__}: {error}")
        except Exception:
            log.exception("session failed", session=session.id)
        finally:
            try:
                session.close()
            finally:
                with self._lock:
                    del self._sessions[session.id]


class _Session:
    """One client at the server: its table, its process group, and its thread."""

    thread: Thread

    def __init__(self, base: str) -> None:
        self.id = uuid.uuid4().hex
        self.tables = KeyValueServer(max_bytes=MAX_TABLE_BYTES)
        self._store = RendezvousStore(base, Table(self.id), server=self.tables, version=UNKNOWN_VERSION)
        self._lock = threading.Lock()
        self._group: ProcessGroup | None = None
        self._aborted = ""

    @property
    def group(self) -> ProcessGroup:
        assert self._group is not None
        return self._group

    def connect(self, group: ProcessGroup) -> None:
        """Connect with the client."""
        with self._lock:
            self._group = group
            if self._aborted:
                raise KeepstepError(self._aborted)
        _connect(group, self._store, self.id, SERVER_RANK)

    def abort(self, reason: str) -> None:
        """End the connection, or the wait for the client. From any thread."""
        self._store.abort(reason)
        with self._lock:
            self._aborted, group = reason, self._group
        if group is not None:
            group.abort(reason)

    def joined(self, deadline: float) -> bool:
        """Wait until the thread has ended, unless this is that thread; return whether it has."""
        if self.thread is threading.current_thread():
            return True
        self.thread.join(max(0.0, deadline - time.monotonic()))
        return not self.thread.is_alive()

    def close(self) -> None:
        """Free the process group and the table; a client that still connects learns it."""
        self.tables.close()
        if self._group is not None:
            self._group.shutdown()


def _new_group(kind: type[ParameterServer]) -> ProcessGroup:
    group: object = kind.new_process_group()
    if not isinstance(group, ProcessGroup):
        raise TypeError(
            f"{kind.__name__}.new_process_group returned a {type(group).__name__}: expected a process group of "
            "keepstep, such as ProcessGroupGloo()"
        )
    return group


def _connect(group: ProcessGroup, store: RendezvousStore, session_id: str, rank: int) -> None:
    group.configure(f"{store.address}/{session_id}", f"session {session_id}", rank, MEMBERS, store=store)


async def _request_session(address: str) -> str:
    """Return the id of a new session."""
    headers = ClientToken().peer_headers()
    try:
        async with client_session() as client, client.post(address, headers=headers, allow_redirects=False) as answer:
            await raise_for_problem(answer)
            session_id = (await read_json_answer(answer, MAX_ANSWER_BYTES)).get("session_id")
    except Problem as error:
        if error.status == HTTPStatus.SERVICE_UNAVAILABLE:
            raise SessionRefused(f"{address} refused a session: {error}") from error
        raise KeepstepError(f"{address} answered {error.status}: {str(error)[:200]}") from error
    except TimeoutError:
        raise TimeoutError(f"the parameter server at {address} did not answer within {REQUEST_SECONDS:g} s") from None
    except aiohttp.ClientError as error:
        raise KeepstepError(f"the parameter server at {address} cannot be reached: {error}") from error
    if not isinstance(session_id, str):
        raise KeepstepError(f"the answer of {address} has no session_id; is it a parameter server of this version?")
    return session_id
