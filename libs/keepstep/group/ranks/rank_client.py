"""The link of a rank other than 0: one connection to the group server."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.parse
from collections.abc import Callable
from typing import Any, TypeVar

from aiohttp import ClientError, ClientSession, ClientTimeout, ClientWSTimeout, WSMsgType

from keepstep.group.merging import Key, key_of
from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.group.ranks.rank_link import RANK_CLOSE_SECONDS, RANK_SILENCE, denial, rank_beats
from keepstep.group.ranks.rank_lists import ListKeeper
from keepstep.group.step_values import StepValues
from keepstep.rendezvous.key_value_server import KeyValueServer
from keepstep.runtime.owned_tasks import OwnedTasks
from keepstep.session.session_events import Push
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError, ProtocolError, SessionClosed
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.net.http import connector
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.group_messages import (
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
    Failed,
    Goodbye,
    Healing,
    Heartbeat,
    Leave,
    Refused,
    ServiceAddress,
    Services,
    Timing,
)
from keepstep_mesh.security.tokens import ClientToken

log = get_logger("keepstep.group")

T = TypeVar("T")

CONNECT_BACKOFF = Backoff(first=0.02, most=1.0)


class RankClient:
    """The link of a rank other than 0, and of ``coordination.ManagerClient``.

    Args:
        address: the group server's ``http://host:port``.
        group_rank: of this process.
        world_size: number of ranks in the group; 0: any.
        restart: the launcher's restart count.
        token: of the job.
        on_failed: called once when the server ends without a goodbye, or reports that the group is lost.
        on_push: called with each message that the lighthouse pushes to the group.
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
        quorum_retries: int = 0,
    ) -> None:
        self._tries = 1 + quorum_retries
        self.replica_id = ""
        self.address = address
        self.layout_lines: list[str] = []
        self.step_values = StepValues()
        self.key_values: KeyValueServer | None = None
        self.live_step = 0
        self.services: tuple[ServiceAddress, ...] = ()
        self.durable_relays: tuple[str, ...] = ()
        self._hello = RankHello(PROTOCOL_VERSION, PROTOCOL_VERSION, group_rank, world_size, restart, keeps_list=True)
        self._token = ClientToken.of(token)
        self._on_failed = on_failed
        self._on_push = on_push
        self._client: ClientSession | None = None
        self._reader: asyncio.Task[None] | None = None
        self._asks: dict[int, asyncio.Future[RankQuorum]] = {}
        self._plan: QuorumPlan | None = None
        """Of the last quorum."""
        self._votes: dict[Key, asyncio.Future[bool]] = {}
        self._tasks = OwnedTasks(self._on_task_error)
        self._goodbye = asyncio.Event()
        self._heard = 0.0
        self._heartbeat_timeout = 0.0
        """Of the job, in seconds, as the group server last reported it."""

    async def start(self, connect_timeout: float) -> None:
        """Connect within ``connect_timeout`` seconds, with retries. TimeoutError with the last reason."""
        self._client = ClientSession(connector=connector(), timeout=ClientTimeout(total=None, connect=connect_timeout))
        failures, reason = 0, "not tried"
        try:
            async with asyncio.timeout(connect_timeout):
                while True:
                    try:
                        await self._connect()
                        return
                    except (ClientError, OSError, TypeError) as error:  # TypeError: closed instead of a frame
                        reason = f"{type(error).__name__}: {error}"
                    failures += 1
                    await asyncio.sleep(CONNECT_BACKOFF.seconds(failures))
        except TimeoutError:
            await self.close()
            raise TimeoutError(
                f"rank {self._hello.group_rank} could not reach its group server at {self.address} within "
                f"{connect_timeout:g} s: {reason}"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _connect(self) -> None:
        assert self._client is not None
        socket = await self._client.ws_connect(
            urllib.parse.urljoin(self.address, "/v1/ranks"),
            headers=self._token.peer_headers(),
            max_msg_size=codec.MAX_SERVER_FRAME_BYTES,
            timeout=ClientWSTimeout(ws_close=RANK_CLOSE_SECONDS),
        )
        await socket.send_bytes(codec.encode(self._hello))
        ready = codec.decode(await socket.receive_bytes(), codec.MAX_SERVER_FRAME_BYTES)
        if isinstance(ready, Refused):
            await socket.close()
            raise KeepstepError(
                f"the group server at {self.address} refused rank {self._hello.group_rank}: {ready.reason}"
            )
        if not isinstance(ready, RankReady):
            raise ProtocolError(
                f"{self.address} is not a group server: its first message is {type(ready).__name__}, expected RankReady"
            )
        self.replica_id = ready.replica_id
        self._socket = socket
        self._heard = asyncio.get_running_loop().time()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        reason = f"the connection to the group server at {self.address} (rank 0) ended"
        beats = asyncio.create_task(self._beat())
        lists = ListKeeper()
        try:
            async for frame in self._socket:
                if frame.type is not WSMsgType.BINARY:
                    break
                self._heard = asyncio.get_running_loop().time()
                message = codec.decode(frame.data, codec.MAX_SERVER_FRAME_BYTES)
                match message:
                    case RankQuorum():
                        answer = lists.restored(message)  # also for a request that was given up
                        self._resolve(self._asks.pop(answer.request, None), answer)
                    case RankDenied():
                        future = self._asks.pop(message.request, None)
                        if future is not None and not future.done():
                            future.set_exception(denial(message))
                    case RankDecision():
                        self._resolve(self._votes.pop(key_of(message), None), message.ok)
                    case Goodbye():
                        self._goodbye.set()
                    case Failed():
                        reason = message.reason
                        break
                    case Heartbeat():
                        pass
                    case Services(services):
                        self.services = services
                    case Timing():
                        self._heartbeat_timeout = message.heartbeat_timeout_ms / 1000
                    case _:
                        self._on_push(message)  # type: ignore[arg-type]
        except ProtocolError as error:
            reason = str(error)
        except Exception as error:  # without its reader this rank is lost, and so is the group
            reason = f"rank {self._hello.group_rank} failed: {error!r}"
            log.error("connection to the group server failed", address=self.address, exc_info=error)
        finally:
            beats.cancel()
            await asyncio.gather(beats, return_exceptions=True)
            unanswered: list[asyncio.Future[Any]] = [*self._asks.values(), *self._votes.values()]
            for waiting in unanswered:
                if not waiting.done():
                    waiting.set_exception(SessionClosed(reason))
                    waiting.exception()
            if not self._goodbye.is_set():
                self._on_failed(reason)

    @staticmethod
    def _resolve(future: asyncio.Future[T] | None, value: T) -> None:
        if future is not None and not future.done():
            future.set_result(value)

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        async for slept in rank_beats():
            if slept:
                self._heard = loop.time()
            if loop.time() - self._heard > (limit := max(RANK_SILENCE, self._heartbeat_timeout)):
                log.error("group server silent", address=self.address, seconds=limit)
                await self._socket.close()
                return
            await self._send(Heartbeat())

    async def _send(self, message: codec.Message) -> None:
        try:
            await self._socket.send_bytes(codec.encode(message))
        except ConnectionError as error:
            raise SessionClosed(f"the connection to the group server at {self.address} ended: {error}") from error

    def stored_at(self, relays: tuple[str, ...]) -> None:
        """See ``RankLink``."""

    async def ask(self, ask: RankAsk) -> QuorumPlan:
        """See ``RankLink``."""
        future: asyncio.Future[RankQuorum] = asyncio.get_running_loop().create_future()
        self._asks[ask.request] = future
        await self._send(ask)
        try:
            answer = await self._answer(future, 2 * ask.timeout_ms / 1000 * self._tries + 10.0)
        except asyncio.CancelledError:
            if ask.min_groups:
                self._tasks.start(self._send_if_open(CancelRequest(ask.request)))
            raise
        finally:
            self._asks.pop(ask.request, None)
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
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        key = key_of(vote)
        self._votes[key] = future
        await self._send(vote)
        try:
            return await self._answer(future, timeout)
        finally:
            self._votes.pop(key, None)

    async def _answer(self, future: asyncio.Future[T], timeout: float) -> T:
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the answer of rank 0 is a TimeoutError
            raise TimeoutError(f"rank 0 at {self.address} did not answer within {timeout:g} s") from None

    def finished_step(self) -> None:
        """Nothing to do: rank 0 notes it."""

    def healing(self, progress: Healing) -> None:
        """See ``RankLink``."""
        self._tasks.start(self._send_if_open(progress))

    async def _send_if_open(self, message: codec.Message) -> None:
        with contextlib.suppress(SessionClosed):  # the reader reports it
            await self._send(message)

    def _on_task_error(self, error: BaseException) -> None:
        log.error("message to the group server not sent", address=self.address, exc_info=error)

    def request_leave(self, reason: str) -> None:
        """Nothing to do: the launcher sends its signal to rank 0 too."""

    async def leave(self, reason: str, timeout: float, *, cause: str = "", step: int | None = None) -> None:
        """See ``RankLink``."""
        if self._reader is None or self._reader.done():
            return
        await self._send(Leave(reason, cause, step))
        async with asyncio.timeout(timeout):
            await self._goodbye.wait()

    async def fail(self, reason: str) -> None:
        """See ``RankLink``."""
        await self._send(Failed(reason))

    async def close(self) -> None:
        """See ``RankLink``."""
        self._goodbye.set()
        await self._tasks.close()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            await self._socket.close()
        if self._client is not None:
            await self._client.close()
