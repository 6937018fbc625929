"""A lighthouse in a thread, and a blocking client that asks it for quorums."""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from keepstep.coordination.connections import CLOSE_LEAVE_SECONDS, Connections
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread, SharedLoopThread
from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.config.settings import Settings, bind_address, split_addresses
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.event_loop import cancelled
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import Data, Member, MemberInfo
from keepstep_mesh.protocol.messages import Quorum as MeshQuorum
from keepstep_mesh.protocol.messages import QuorumRequest
from keepstep_mesh.protocol.policy import Policy, policy_problem
from keepstep_mesh.protocol.records import maker
from keepstep_mesh.security.reloaded_files import ReloadedFiles
from keepstep_mesh.serving.listen_settings import ListenSettings, read_listen_settings

if TYPE_CHECKING:
    from keepstep_lighthouse.app import Lighthouse

log = get_logger("keepstep.coordination")

START_SECONDS = 30.0
"""Time limit for starting and for stopping the lighthouse."""
_clients_loop = SharedLoopThread("keepstep-lighthouse-clients")
_make_request = maker(QuorumRequest)


@dataclass(frozen=True, slots=True)
class QuorumMember:
    """One participant of a quorum.

    Args:
        replica_id, address, store_address, step, world_size, shrink_only, data: what this participant passed to
            ``LighthouseClient.quorum``.
    """

    replica_id: str
    address: str
    store_address: str
    step: int
    world_size: int
    shrink_only: bool
    data: Data = None


@dataclass(frozen=True)
class _Participants:
    """The members of an answer. ``step``: of all of them; None: ``members`` has the step of each."""

    members: tuple[Member, ...]
    step: int | None

    @staticmethod
    def of(answer: MeshQuorum) -> _Participants:
        if answer.uniform:
            return _Participants(answer.listed, answer.step)
        step = answer.listed[0].step if answer.listed else None
        alike = all(one.step == step and not one.shrink_only for one in answer.listed)
        return _Participants(answer.listed, step if alike else None)

    def says_the_same(self, other: _Participants) -> bool:
        return self.members is other.members and self.step == other.step

    @functools.cached_property
    def as_list(self) -> list[QuorumMember]:
        return [
            QuorumMember(
                one.replica_id,
                one.info.address,
                one.info.store_address,
                one.step if self.step is None else self.step,
                one.info.world_size,
                self.step is None and one.shrink_only,
                one.info.data,
            )
            for one in self.members
        ]


class Quorum:
    """A quorum. ``participants`` has its members.

    Args:
        quorum_id: changes whenever the members change.
        created: Unix time in seconds at which this quorum_id was formed.
    """

    __slots__ = ("_participants", "created", "quorum_id")

    def __init__(self, quorum_id: int, participants: _Participants, created: float) -> None:
        self.quorum_id = quorum_id
        self.created = created
        self._participants = participants

    @property
    def participants(self) -> list[QuorumMember]:
        """All members, sorted by ``replica_id``.

        The list is built when it is first read. While nothing in it changes, every ``Quorum`` of a replica has the
        same list object: copy it before you change it.
        """
        return self._participants.as_list

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Quorum):
            return NotImplemented
        mine, theirs = (self.quorum_id, self.created), (other.quorum_id, other.created)
        return mine == theirs and self.participants == other.participants

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Quorum(quorum_id={self.quorum_id}, participants={self.participants}, created={self.created})"


class LighthouseServer:
    """A lighthouse in a thread of its own. Keeps its state in memory.

    Args:
        bind: ``host:port``; port 0 takes a free one. ``[::]`` and ``0.0.0.0`` mean all interfaces if the lighthouse
            has a token (``KEEPSTEP_WORKER_TOKEN`` ...) or ``KEEPSTEP_LIGHTHOUSE_INSECURE`` is 1, else 127.0.0.1 only.
        min_replicas: a quorum has at least this many groups.
        join_timeout_ms: how long a quorum waits for healthy groups that have not asked; default 60 s, in a script that
            imports torchft through ``keepstep.compat`` 100 ms as there.
        quorum_tick_ms: ignored; accepted for compatibility with torchft.
        heartbeat_timeout_ms: silence after which a group counts as dead; default 5 s.

    Raises:
        RuntimeError: the lighthouse's dependencies are not installed.
        ValueError: a value is out of range; the message has the limit.
        OSError: ``bind`` is not available.
    """

    default_join_timeout_ms: int | None = None
    """In place of ``join_timeout_ms=None``. None: that of a job."""

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,  # noqa: ARG002
        heartbeat_timeout_ms: int | None = None,
    ) -> None:
        try:
            from keepstep_lighthouse.app import Lighthouse, LighthouseSettings  # noqa: PLC0415  a service, loaded lazily
        except ImportError as error:
            raise RuntimeError(f"LighthouseServer needs pip install 'keepstep[services]': {error}") from error
        if join_timeout_ms is None:
            join_timeout_ms = self.default_join_timeout_ms
        given = {"join_timeout": join_timeout_ms, "heartbeat_timeout": heartbeat_timeout_ms}
        limits: dict[str, Any] = {name: ms / 1000 for name, ms in given.items() if ms is not None}
        policy = Policy(min_replicas, **limits)
        if (problem := policy_problem(policy)) is not None:
            raise ValueError(problem)
        settings = Settings(flags={"lighthouse_bind": bind.removeprefix("http://")})
        listen = ListenSettings(**read_listen_settings(settings, "lighthouse", bind))
        host, port = bind_address(listen.bind)
        if host in ("::", "0.0.0.0"):  # noqa: S104  torchft's spelling of "everywhere"
            listen = replace(listen, bind=f"{_interfaces(listen)}:{port}")
        self._loop_thread = LoopThread("keepstep-lighthouse")
        try:
            self._service: Lighthouse = Lighthouse(LighthouseSettings(**vars(listen), policy=policy))
            self._loop_thread.call(self._service.start(), START_SECONDS)
        except BaseException:
            self._loop_thread.stop()
            raise

    def address(self) -> str:
        """Return ``http://host:port``, as other machines reach it; ``https`` with ``KEEPSTEP_LIGHTHOUSE_TLS_CERT``.

        The host is that of ``bind``. If the lighthouse listens on all interfaces, it is the address of the one with the
        default route. ``KEEPSTEP_LIGHTHOUSE_ADVERTISE=host:port`` overrides both.
        """
        return self._service.known_address

    def shutdown(self) -> None:
        """Stop the lighthouse and its thread. Sessions of clients break."""
        self._loop_thread.call(self._service.stop(), START_SECONDS)
        self._loop_thread.stop()


def _interfaces(listen: ListenSettings) -> str:
    """Return the host to listen on in place of "all interfaces": without a token, this machine only."""
    tokens = listen.tokens.value if isinstance(listen.tokens, ReloadedFiles) else listen.tokens
    if tokens or listen.insecure:
        return "0.0.0.0"  # noqa: S104
    log.warning(
        "listening on this machine only, because no token is set; for trainers on other machines set "
        "KEEPSTEP_WORKER_TOKEN here and KEEPSTEP_TOKEN there, or KEEPSTEP_LIGHTHOUSE_INSECURE=1",
        bind=listen.bind,
    )
    return "127.0.0.1"


class _Replica:
    """The calls of one replica_id, and its last values, so that a round without a change builds no objects.

    A context manager, for the time of a call.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls = 0
        """Number of calls that have not returned."""
        self.last_call = 0.0
        """End of the last one, on ``time.monotonic``."""
        self.left: asyncio.Task[None] | None = None
        """Leaves with the session of a silent replica_id."""
        self._values: tuple[object, ...] = ()
        self._info = MemberInfo()
        self._participants = _Participants((), None)

    def __enter__(self) -> None:
        with self.lock:
            self.calls += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.calls -= 1
            self.last_call = time.monotonic()

    def info(self, address: str, store_address: str, world_size: int, data: Data) -> MemberInfo:
        """Return the same object while the values are equal."""
        if data is not None:
            data = codec.unpack(codec.pack(data))  # a copy: the caller may change ``data`` in place between rounds
        values = (address, store_address, world_size, "", data)
        if values != self._values:
            self._values, self._info = values, MemberInfo(*values)
        return self._info

    def participants(self, answer: MeshQuorum) -> _Participants:
        """Return the same object while the answers say the same."""
        participants = _Participants.of(answer)
        if not participants.says_the_same(self._participants):
            self._participants = participants
        return self._participants


class LighthouseClient:
    """Ask a lighthouse for quorums, under any replica_id. Each replica_id has a session of its own.

    A replica_id is alive while ``quorum`` waits, and until the heartbeat timeout of the job (5 s) after the last call
    with it. Then its session leaves the job; the next call opens another one.

    Safe to share between threads: each thread blocks in its own ``quorum``.

    Args:
        addr: ``http://host:port`` of the lighthouse; several are separated by commas.
        connect_timeout: time limit of the first connection of each replica_id.
    """

    def __init__(self, addr: str, connect_timeout: timedelta) -> None:
        self._addresses = split_addresses(addr)
        self._connect_timeout = connect_timeout.total_seconds()
        self._loop_thread = _clients_loop.take()
        self._sessions = Connections(self._loop_thread, self._open_session)
        self._replicas: collections.defaultdict[str, _Replica] = collections.defaultdict(_Replica)

    async def _open_session(self, replica_id: str) -> LighthouseSession:
        session = LighthouseSession(
            SessionSettings.from_environment(self._addresses, replica_id, connect_timeout=self._connect_timeout),
            lambda _: None,
        )
        replica = self._replicas[replica_id]
        if replica.left is not None:
            await replica.left
        await session.start()
        replica.left = asyncio.get_running_loop().create_task(self._leave_when_silent(replica_id, replica, session))
        return session

    async def _leave_when_silent(self, replica_id: str, replica: _Replica, session: LighthouseSession) -> None:
        replica.last_call = time.monotonic()
        while True:
            limit = session.liveness.timeout
            await asyncio.sleep(limit if replica.calls else max(0.0, replica.last_call + limit - time.monotonic()))
            with replica.lock:
                if not replica.calls and time.monotonic() >= replica.last_call + limit:
                    self._sessions.forget(replica_id)
                    break
        try:
            await session.leave(f"{replica_id} is silent for {limit:g} s", CLOSE_LEAVE_SECONDS)
        except (TimeoutError, KeepstepError) as error:
            log.info("closed without a graceful leave", reason=f"{type(error).__name__}: {error}")
        await session.close()

    def _session(self, replica_id: str) -> LighthouseSession:
        return self._sessions.get(replica_id, self._connect_timeout + CALL_MARGIN_SECONDS)

    def quorum(
        self,
        replica_id: str,
        timeout: timedelta,
        address: str | None = None,
        store_address: str | None = None,
        step: int | None = None,
        world_size: int | None = None,
        shrink_only: bool | None = None,
        data: Data = None,
    ) -> Quorum:
        """Ask for the next quorum and wait for it.

        Args:
            replica_id: name of this replica; one request at a time.
            timeout: time limit of the request; the first one of a replica_id also waits up to ``connect_timeout``.
            address: address of this replica's manager, for the other participants.
            store_address: address of this replica's store, for the other participants.
            step: current step; default 0.
            world_size: number of ranks of this replica; default 0.
            shrink_only: if true, the quorum takes only members of the previous one.
            data: any msgpack value of up to 64 KiB, for the other participants.

        Returns:
            The quorum. It has the same list of participants as the one before while nothing in it changes.

        Raises:
            TimeoutError: no quorum within ``timeout``; the message has the lighthouse's reason.
            RuntimeError: any other failure.
        """
        replica = self._replicas[replica_id]
        seconds = timeout.total_seconds()
        request = _make_request(
            request=0,
            step=step or 0,
            lineage="",
            shrink_only=bool(shrink_only),
            commit_failures=0,
            timeout_ms=max(1, round(seconds * 1000)),
            info=replica.info(address or "", store_address or "", world_size or 0, data),
        )
        with replica:
            session = self._session(replica_id)
            answer = self._loop_thread.wait_for(lambda: session.request_quorum(request), seconds + CALL_MARGIN_SECONDS)
        return Quorum(answer.quorum_id, replica.participants(answer), answer.created_ms / 1000)

    def heartbeat(self, replica_id: str, timeout: timedelta = timedelta(seconds=5)) -> None:
        """Report ``replica_id`` as alive. Call it more often than the heartbeat timeout of the job.

        Args:
            replica_id: name of the replica.
            timeout: time limit; the first call for a replica_id also waits up to ``connect_timeout``.

        Raises:
            TimeoutError: no lighthouse answered.
        """
        seconds = timeout.total_seconds()
        with self._replicas[replica_id]:
            self._loop_thread.call(self._session(replica_id).probe(seconds), seconds + CALL_MARGIN_SECONDS)

    def shutdown(self) -> None:
        """Leave with all replica_ids, and close their sessions. The last client of the process stops the thread."""
        if self._sessions.leave_all("client shut down"):
            self._loop_thread.call(self._watch_no_longer(), CALL_MARGIN_SECONDS)
            _clients_loop.give_back(self._loop_thread)

    async def _watch_no_longer(self) -> None:
        for replica in self._replicas.values():
            if replica.left is not None:
                await cancelled(replica.left)
