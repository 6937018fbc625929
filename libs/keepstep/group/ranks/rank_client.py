"""The link of a rank other than 0: its session with the group server."""

from __future__ import annotations

import asyncio
import urllib.parse
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import aiohttp

from keepstep.group.agreement import StepValues
from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.group.ranks.merging import key_of
from keepstep.group.ranks.rank_link import denial, rank_liveness, silence_limit
from keepstep.group.ranks.rank_lists import ListKeeper
from keepstep.rendezvous.key_value_server import KeyValueServer
from keepstep.session.session import Session
from keepstep.session.session_events import Push
from keepstep.stacks.activity import Activity
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError, ProtocolError, SessionClosed
from keepstep_mesh.net.http import connector
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import (
    Compared,
    ComparedRequest,
    RankAsk,
    RankDecision,
    RankDenied,
    RankHello,
    RankQuorum,
    RankReady,
    RankVote,
)
from keepstep_mesh.protocol.messages import (
    PROTOCOL_VERSION,
    CancelRequest,
    Drain,
    Failed,
    Goodbye,
    Healing,
    Heartbeat,
    Leave,
    Refused,
    ServiceAddress,
    Services,
    ShardReport,
    Timing,
)
from keepstep_mesh.protocol.stack_messages import RankStacks
from keepstep_mesh.security.tokens import ClientToken

log = get_logger("keepstep.group")


class RankClient:
    """The link of a rank other than 0, and of ``coordination.ManagerClient``. A lost connection is not opened again.

    Args:
        address: the group server's ``http://host:port``.
        group_rank: of this process.
        world_size: number of ranks in the group; 0: any.
        restart: the launcher's restart count.
        token: of the job.
        on_failed: called once when the server ends without a goodbye, or reports that the group is lost.
        on_push: called with each message that the lighthouse pushes to the group.
        activity: of the training thread; None: this thread.
        quorum_retries: number of times that rank 0 asks again.
    """

    def __init__(
        self,
        address: str,
        group_rank: int,
        world_size: int,
        restart: int,
        token: str | ClientToken | None,
        on_failed: Callable[[str], None],
        on_push: Callable[[Push], None],
        activity: Activity | None = None,
        quorum_retries: int = 0,
    ) -> None:
        self._tries = 1 + quorum_retries
        self.replica_id = ""
        self.activity = activity or Activity()
        self.address = address
        self.layout_lines: list[str] = []
        self.layout_changed = False
        self.step_values = StepValues()
        self.joins = ""
        self.key_values: KeyValueServer | None = None
        self.live_step = 0
        self.services: tuple[ServiceAddress, ...] = ()
        self.durable_relays: tuple[str, ...] = ()
        self._hello = RankHello(PROTOCOL_VERSION, PROTOCOL_VERSION, group_rank, world_size, restart, keeps_list=True)
        self._rank = f"rank {group_rank}"
        self._token = ClientToken.of(token)
        self._on_failed = on_failed
        self._on_push = on_push
        self._plan: QuorumPlan | None = None
        """Of the last quorum."""
        self._lists = ListKeeper()
        self._session = Session(
            self,
            "group server",
            log.bind(rank=group_rank),
            [urllib.parse.urljoin(address, "/").rstrip("/")],
            "/v1/ranks",
            rank_liveness(),
        )

    async def start(self, connect_timeout: float) -> None:
        """Connect within ``connect_timeout`` seconds, with retries. TimeoutError with the last reason."""
        problem = f"{self._rank} could not reach its group server at {self.address}"
        # A hello that is sent again is refused: the server still has the connection of the first.
        await self._session.start(self._open_http, connect_timeout, problem, welcome_seconds=connect_timeout)

    def _open_http(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=connector(), timeout=aiohttp.ClientTimeout(total=None), headers=self._token.peer_headers()
        )

    # ---- the dialogue

    def hello(self) -> codec.Message:
        """See ``Dialogue``."""
        return self._hello

    def final_error(self, error: Exception, problem: str) -> KeepstepError | None:  # noqa: ARG002
        """See ``Dialogue``. The server may be about to start, or to learn the token of this rank."""
        return None

    def on_bad(self, error: Exception) -> None:
        """See ``Dialogue``. A rank that misses a message is lost, and so is the group."""
        if isinstance(error, ProtocolError):
            self._session.refuse(error)
        else:
            log.error("message to this rank not handled", address=self.address, exc_info=error)
            self._lost(f"{self._rank} failed: {error!r}")

    def on_disconnected(self, address: str, reason: str) -> None:
        """Report that the group is lost."""
        self._lost(f"the connection to the group server at {address} (rank 0) ended: {reason}")

    def _lost(self, reason: str) -> None:
        if self._session.error is None:
            self._session.end(SessionClosed(reason))
            self._on_failed(reason)

    def on_message(self, message: codec.Message) -> None:
        """See ``Dialogue``."""
        match message:
            case RankQuorum():
                answer = self._lists.restored(message)  # also for a request that was given up
                self._session.requests.answer(answer.request, answer)
            case RankDecision():
                self._session.requests.answer(key_of(message), message.ok)
            case Heartbeat():
                pass
            case ComparedRequest(number):
                self._session.send(compared(number, self.layout_lines, self.step_values.lines()))
            case RankDenied():
                self._session.requests.fail(message.request, denial(message))
            case RankReady() if not self._session.is_answered:
                self.replica_id = message.replica_id
                self._session.welcome()
            case Refused():
                refused = f"the group server at {self.address} refused {self._rank}: {message.reason}"
                self._session.end(KeepstepError(refused))
            case _ if not self._session.is_answered:
                name = type(message).__name__
                wrong = f"{self.address} is not a group server: its first message is {name}, expected RankReady"
                self._session.end(ProtocolError(wrong))
            case Goodbye():
                self._session.end(SessionClosed(f"the group server at {self.address} (rank 0) has ended"))
            case Failed():
                self._lost(message.reason)
            case Services(services):
                self.services = services
            case Timing():
                self._session.liveness.timeout = silence_limit(message.heartbeat_timeout_ms / 1000)
            case _:
                self._on_push(message)  # type: ignore[arg-type]

    # ---- the link

    def stored_at(self, relays: tuple[str, ...]) -> None:
        """See ``RankLink``."""

    async def ask(self, ask: RankAsk) -> QuorumPlan:
        """See ``RankLink``."""
        limit = 2 * ask.timeout_ms / 1000 * self._tries + 10.0
        answer = await self._request(ask.request, ask, limit, self._withdraw if ask.min_groups else None)
        self._plan = plan = make_plan(
            answer.quorum,
            self.replica_id,
            self._plan,
            attempt=answer.attempt,
            heal_timeout_ms=answer.heal_timeout_ms,
            brings_late=ask.min_groups > 0 and not answer.quorum.finishing,
        )
        return plan

    async def vote(self, vote: RankVote, timeout: float) -> bool:
        """See ``RankLink``."""
        ok: bool = await self._request(key_of(vote), vote, timeout)
        return ok

    def _request(
        self, key: Hashable, message: codec.Message, limit: float, given_up: Callable[[int], None] | None = None
    ) -> asyncio.Future[Any]:
        """Send a request that rank 0 answers within ``limit`` seconds."""
        if self._session.error is not None:
            raise self._session.error
        deadline = asyncio.get_running_loop().time() + limit
        answer = self._session.requests.open(
            key, deadline, lambda: f"rank 0 at {self.address} did not answer within {limit:g} s", given_up
        )
        self._session.send(message)
        return answer

    def _withdraw(self, request: int) -> None:
        self._session.send(CancelRequest(request))

    def finished_step(self) -> None:
        """Nothing to do: rank 0 notes it."""

    def healing(self, progress: Healing) -> None:
        """See ``RankLink``."""
        self._session.send(progress)

    def shards(self, report: ShardReport) -> None:
        """See ``RankLink``."""
        self._session.send(report)

    def stacks(self, found: RankStacks) -> None:
        """See ``RankLink``."""
        self._session.send(found)

    def request_leave(self, reason: str) -> None:
        """See ``RankLink``. The signal may have reached this machine only."""
        self._session.send(Drain(reason))

    async def leave(self, reason: str, timeout: float, *, cause: str = "", step: int | None = None) -> None:
        """See ``RankLink``."""
        await self._session.leave(Leave(reason, cause, step), timeout)

    async def fail(self, reason: str) -> None:
        """See ``RankLink``."""
        self._session.send(Failed(reason))

    async def close(self) -> None:
        """See ``RankLink``."""
        await self._session.close()


def compared(number: int, lines: Sequence[str], values: Mapping[str, Mapping[str, str]]) -> Compared:
    """Return the answer to a ``ComparedRequest``. See ``Compared``."""
    of_steps = [f"{step}\t{name}\t{text}" for step, named in values.items() for name, text in named.items()]
    answer = Compared(number, *(tuple(one[: codec.MAX_TEXT] for one in part) for part in (lines, of_steps)))
    items = len(answer.lines) + len(answer.values)
    fits = items < codec.MAX_ITEMS and len(codec.encode(answer)) <= codec.MAX_FRAME_BYTES
    return answer if fits else Compared(number)
