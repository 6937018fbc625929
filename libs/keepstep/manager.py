"""One training step of a replica group, in order.

    start_quorum    ask, and unless async wait; heal if this is a first step or the quorum is synchronous
    allreduce       wait for the quorum and the process group, contribute, average over who takes part
    should_commit   wait for what is in flight, hand out or take in live state, vote with the group's other ranks

Everything that talks runs on the mesh thread; everything that touches the user's state runs on the training thread.
What each step does is decided by ``quorum_plan``; the waits are here, and each has a deadline.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work
from torch.futures import Future

from keepstep import environment
from keepstep.checkpointing.errors import TransferError
from keepstep.checkpointing.http import HTTPTransport
from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.exits import (
    EXIT_EVICTED,
    EXIT_GROUP_FAILED,
    EvictedExit,
    GroupFailedExit,
    TerminationFlag,
    end_process,
)
from keepstep.futures import future_timeout
from keepstep.group import Leaving, RankLink
from keepstep.group_core import DisagreeError
from keepstep.group_link import LinkSettings, connect_group
from keepstep.group_peers import checkpoint_metadata, first_layout_difference
from keepstep.layout import layout_digest
from keepstep.live_state import LiveState
from keepstep.managed_work import ManagedWork
from keepstep.mesh_thread import MeshThread
from keepstep.quorum_plan import QuorumPlan, make_plan
from keepstep.reconfigure import Reconfigurer
from keepstep.step_log import StepLog
from keepstep_mesh.errors import Banned, Drained, KeepstepError, LayoutMismatch, SessionClosed
from keepstep_mesh.lineage import TORN
from keepstep_mesh.logging import get_logger
from keepstep_mesh.messages import (
    Drain,
    Evicted,
    Lineage,
    MemberLost,
    RankAsk,
    RankVote,
    RoundBroken,
    ServiceAddress,
)
from keepstep_mesh.session import Push

T = TypeVar("T")

log = get_logger("keepstep.manager")

STREAMS = 4
"""Parallel streams of a heal with the default transport; measured faster than one and than sixteen."""
SLACK = 15.0
"""Seconds that the training thread waits beyond a deadline that the mesh thread keeps."""


class WorldSizeMode(Enum):
    """How many groups take part in a step.

    DYNAMIC: all that are there. FIXED_WITH_SPARES: at most ``min_replica_size``; the rest contribute zeros and stand
    by.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class _Attempt:
    """One attempt at one step: from ``start_quorum`` to ``should_commit``."""

    def __init__(self, allow_heal: bool, sync: bool, timeout: float) -> None:
        self.allow_heal = allow_heal
        self.sync = sync
        self.timeout = timeout
        self.ready: concurrent.futures.Future[QuorumPlan] | None = None
        self.number = 0
        self.plan: QuorumPlan | None = None
        self.error: Exception | None = None
        self.works: list[ManagedWork] = []
        self.staged = False
        self.heal_tried = False
        self.healed = False
        self.all_participate = sync
        self.answered: QuorumPlan | None = None
        """The plan from when the quorum is there; ``plan`` from when the training thread has waited for all of it."""
        self.done = False


class Manager:
    """Keeps one replica group in step with the others.

    Args:
        pg: process group over the replica groups, one of ``keepstep.ProcessGroup*``; reconfigured as members change.
        load_state_dict, state_dict: the user's state, registered under "default"; None: register it later.
        min_replica_size: groups that must take part for a step to commit.
        use_async_quorum: True overlaps the quorum with the forward pass; a healing group then contributes zeros in its
            first step. False: everybody waits, heals, and takes part.
        timeout: of collectives, heals and commit votes (``KEEPSTEP_TIMEOUT_SEC``).
        quorum_timeout: how long to wait for a quorum (``KEEPSTEP_QUORUM_TIMEOUT_SEC``).
        connect_timeout: of reaching the lighthouse and the group's rank 0 (``KEEPSTEP_CONNECT_TIMEOUT_SEC``).
        rank, world_size: of this process within its group; default: RANK and WORLD_SIZE, else a group of one.
        world_size_mode: see ``WorldSizeMode``.
        store_addr, store_port: where the ranks of one group find each other; default: MASTER_ADDR and MASTER_PORT.
            Not used by a group of one.
        lighthouse_addr: ``http://host:port``, several separated by commas; default: ``KEEPSTEP_LIGHTHOUSE``.
        replica_id: stable name of the group; default: ``REPLICA_GROUP_ID`` (``r0`` for 0), else a random name.
        port: of the group server on rank 0 (``KEEPSTEP_MANAGER_PORT``); default: any free one.
        hostname: to advertise; default: the address of the interface that reaches the lighthouse.
        heartbeat_interval: between heartbeats to the lighthouse, unless it asks for fewer.
        checkpoint_transport: how live state travels; default: ``HTTPTransport``.
        init_sync: True: at the first step all groups take over the weights of one. False: they are equal already.
        max_retries: failed commits in a row after which ``should_commit`` raises; None: no limit.
        quorum_retries: how often a quorum that timed out is asked for again (``KEEPSTEP_QUORUM_RETRIES``).

    Raises:
        ValueError: an argument or variable makes no sense.
        TimeoutError: the lighthouse, or the group's rank 0, was not reached within ``connect_timeout``.
        EvictedExit: the group is banned.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta = timedelta(seconds=60),
        quorum_timeout: timedelta = timedelta(seconds=60),
        connect_timeout: timedelta = timedelta(seconds=60),
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta = timedelta(milliseconds=100),
        checkpoint_transport: CheckpointTransport[dict[str, Any]] | None = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
    ) -> None:
        if min_replica_size < 1:
            raise ValueError(f"min_replica_size={min_replica_size} must be at least 1")
        self._timeout = environment.seconds("TIMEOUT_SEC", timeout)
        self._quorum_timeout = environment.seconds("QUORUM_TIMEOUT_SEC", quorum_timeout)
        self._connect_timeout = environment.seconds("CONNECT_TIMEOUT_SEC", connect_timeout)
        self._min_replica_size = min_replica_size
        self._use_async_quorum = use_async_quorum
        self._world_size_mode = world_size_mode
        self._init_sync = init_sync
        self._max_retries = max_retries
        self._rank = environment.rank_or_size("RANK", rank, 0)
        self._group_world_size = environment.rank_or_size("WORLD_SIZE", world_size, 1)

        settings = LinkSettings.from_arguments(
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            rank=self._rank,
            world_size=self._group_world_size,
            store_addr=store_addr,
            store_port=store_port,
            port=port,
            hostname=hostname,
            heartbeat_interval=heartbeat_interval.total_seconds(),
            connect_timeout=self._connect_timeout.total_seconds(),
            quorum_retries=environment.integer("QUORUM_RETRIES", quorum_retries),
        )
        self._settings = settings
        self._state = LiveState(self.state_dict, self._take_over)
        if state_dict is not None and load_state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)

        self._step = 0
        self._batches_committed = 0
        self._commit_failures = 0
        self._attempt: _Attempt | None = None
        self._last_plan: QuorumPlan | None = None
        self._requests = 0
        self._leaving = ""
        self._fatal: BaseException | None = None
        self._layout: list[str] = []
        self._layout_digest = ""
        self._shut_down = False
        self._early: list[Push] | None = []
        """What was pushed before there was anything to act upon it; None from then on."""

        self._mesh = MeshThread()
        closing = contextlib.ExitStack()
        closing.callback(self._mesh.stop)
        with closing:
            self._link: RankLink
            # the store's server ends with its last reference, and other ranks may come to it late
            try:
                self._link, self._store = connect_group(self._mesh, settings, self._group_failed, self._pushed)
            except Banned as error:
                raise EvictedExit(str(error)) from error
            closing.callback(lambda: self._mesh.call(self._link.close(), SLACK))
            self._log = log.bind(replica_id=self._link.replica_id, rank=self._rank)
            self._lineage: Lineage = self._link.replica_id if init_sync else ""
            self._reconfigurer = Reconfigurer(
                pg,
                job=settings.job,
                replica_id=self._link.replica_id,
                group_rank=self._rank,
                group_world_size=self._group_world_size,
                token=settings.token,
                host=settings.host,
                key_values=self._link.key_values,
                own_address=self._link.address,
                timeout=self._timeout,
            )
            self._transport: CheckpointTransport[dict[str, Any]] = checkpoint_transport or HTTPTransport(
                timeout=self._timeout, num_chunks=STREAMS, hostname=settings.host, token=settings.token
            )
            self._steps = StepLog(settings.job, self._link.replica_id, self._rank)
            self._steps.write("started", self._step, 0, lineage=self._lineage)
            self._termination = TerminationFlag(self._wish_to_leave)
            closing.pop_all()
        self._mesh.loop.call_soon_threadsafe(self._hear_early_pushes)
        atexit.register(self.shutdown)  # a script that just ends leaves too

    # ---- state

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[T], None],
        state_dict: Callable[[], T],
    ) -> None:
        """Adds a named part of the user's state that heals. ValueError when the key is taken."""
        self._state.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """The user's state under "default", replacing what was registered there."""
        self._state.register("default", load_state_dict, state_dict, replace=True)

    def allow_state_dict_read(self) -> None:
        """Ends ``disallow_state_dict_read``."""
        self._state.readable = True

    def disallow_state_dict_read(self) -> None:
        """Until allowed again no healing group is given this state: it is in the middle of a change."""
        self._state.readable = False

    def set_layout(self, lines: list[str]) -> None:
        """What all groups must have in common, one line a parameter or bucket; DDP says so for its module.

        A group whose lines differ from the job's is refused, with the first difference named.
        """
        self._layout = lines
        self._layout_digest = layout_digest(lines)
        self._link.layout_lines = lines

    def state_dict(self) -> dict[str, Any]:
        """For the user's own checkpoint: step, batches_committed and, once there is one, the lineage."""
        state: dict[str, Any] = {"step": self._step, "batches_committed": self._batches_committed}
        if isinstance(self._lineage, int):
            state["lineage"] = self._lineage
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the user's own checkpoint; takes torchft's too (no lineage)."""
        self._take_over(state_dict)
        self._steps.write("loaded", self._step, 0, lineage=self._lineage)

    def _take_over(self, state_dict: dict[str, Any]) -> None:
        self._step = int(state_dict["step"])
        self._batches_committed = int(state_dict["batches_committed"])
        self._lineage = state_dict.get("lineage", self._lineage if self._step == 0 else "")

    def mark_torn(self) -> None:
        """This group's state is of no step any more (a heal or an optimizer broke in the middle).

        It heals from another group at the next step, and never counts as a state that others could heal from.
        """
        self._step, self._lineage = 0, f"{TORN}{self._link.replica_id}"
        self._steps.write("torn", 0, 0, lineage=self._lineage)

    # ---- facts of the step

    def current_step(self) -> int:
        """Steps committed so far; changes only in ``should_commit`` and with a heal."""
        return self._step

    def batches_committed(self) -> int:
        """Batches of all groups that went into committed steps."""
        return self._batches_committed

    def replica_id(self) -> str:
        """This incarnation of the group: ``name:uuid``."""
        return self._link.replica_id

    @property
    def services(self) -> tuple[ServiceAddress, ...]:
        """Where relays and the metrics service are: what registered with the lighthouse and is there now."""
        return self._link.services

    def participating_rank(self) -> int | None:
        """This group's place among those that take part; None while it heals or stands by. Waits for the quorum.

        After ``should_commit`` that of the step that ended, as with ``num_participants`` and ``is_participating``.
        """
        return self._latest_participation()[0]

    def num_participants(self) -> int:
        """How many groups take part in this step. Waits for the quorum."""
        return self._latest_participation()[1]

    def is_participating(self) -> bool:
        return self.participating_rank() is not None

    def _latest_participation(self) -> tuple[int | None, int]:
        attempt = self._attempt
        if attempt is not None and attempt.done and attempt.plan is not None:
            return self._participation(attempt, attempt.plan)
        return self._participation(self._current(), self._wait_plan())

    def _participation(self, attempt: _Attempt, plan: QuorumPlan) -> tuple[int | None, int]:
        rank: int | None
        if attempt.all_participate:
            rank, world = plan.replica_rank, plan.replica_world_size
        else:
            rank, world = plan.max_replica_rank, plan.max_world_size
        if self._world_size_mode is WorldSizeMode.FIXED_WITH_SPARES:
            world = min(world, self._min_replica_size)
            if rank is not None and rank >= world:
                rank = None
        return rank, world

    # ---- errors

    def report_error(self, e: Exception) -> None:
        """This step will not commit. The process group is aborted, so that nobody waits for us."""
        if self._attempt is not None:
            self._report(self._attempt, e)

    def _report(self, attempt: _Attempt, error: Exception) -> None:
        """What goes wrong late with one step is not held against the next."""
        if not attempt.done and attempt.error is None:
            attempt.error = error
            self._log.warning("step will not commit", step=self._step, reason=f"{type(error).__name__}: {error}")
            self._reconfigurer.abort(f"this group reported {type(error).__name__}: {error}")

    def errored(self) -> Exception | None:
        """What went wrong in this step, or in the last one until the next begins; None when nothing did."""
        return self._attempt.error if self._attempt is not None else None

    def wrap_future(self, fut: Future[T], default: T, timeout: timedelta | None = None) -> Future[T]:
        """A future that gives ``default``, and reports, when ``fut`` fails or takes longer than ``timeout``.

        Wait for it before ``should_commit``: what it reports later is too late for this step, and not held against
        the next.
        """
        attempt = self._attempt

        def value_or_default(source: Future[T]) -> T:
            try:
                return source.value()
            except Exception as error:  # noqa: BLE001  any error means that the step does not commit
                if attempt is not None:
                    self._report(attempt, error)
                return default

        return future_timeout(fut, timeout or self._timeout).then(value_or_default)

    # ---- a step

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begins a step.

        Args:
            allow_heal: False: a group that is behind takes part as it is (LocalSGD's sync points).
            shrink_only: take no new groups in.
            timeout: for the quorum, instead of ``quorum_timeout``.

        Raises:
            Drained: the group was asked to leave, and has.
            TimeoutError, KeepstepError: with a synchronous quorum, what went wrong; the next call asks again.
        """
        self._raise_fatal()
        if self._attempt is not None and not self._attempt.done:
            self._abandon(self._attempt)
        if self._leaving and self._group_world_size == 1:
            self._leave_and_raise()
        sync = not self._use_async_quorum or not allow_heal
        limit = (timeout or self._quorum_timeout).total_seconds()
        self._requests += 1
        attempt = self._attempt = _Attempt(allow_heal, sync, limit)
        ask = RankAsk(
            request=self._requests,
            step=self._step,
            lineage=self._lineage,
            shrink_only=shrink_only,
            commit_failures=max(self._commit_failures, 1 if self._reconfigurer.broken else 0),
            timeout_ms=max(1, round(limit * 1000)),
            leaving=self._leaving,
            layout=self._layout_digest,
            checkpoint=self._transport.metadata(),
        )
        attempt.ready = self._mesh.spawn(self._get_ready(attempt, ask))
        first_step = self._init_sync and self._step == 0
        if sync or first_step:
            plan = self._wait_plan()
            if plan.max_step == 0 and first_step:
                attempt.all_participate = True
            if attempt.all_participate and allow_heal and attempt.error is None:
                self._exchange_state(attempt, plan)

    async def _get_ready(self, attempt: _Attempt, ask: RankAsk) -> QuorumPlan:
        answer = await self._link.ask(ask)
        attempt.answered = plan = self._last_plan = make_plan(answer.quorum, self._link.replica_id, self._last_plan)
        attempt.number = answer.attempt
        self._transport.disallow_checkpoint()  # whoever read the state of the step before is done or too late
        if plan.heal and attempt.allow_heal:
            self._link.healing(0, 0, 0.0)
        try:
            built = await self._reconfigurer.follow(plan)
            self._steps.quorum(self._step, plan, built=built)
        except Exception as error:  # noqa: BLE001  a process group that cannot be built is a failed step, whatever it says
            self._report(attempt, error)
        return plan

    def wait_quorum(self) -> None:
        """Waits until the quorum is there and the process group fits it. Raises what went wrong."""
        self._wait_plan()
        error = self.errored()
        if error is not None:
            raise error

    def _current(self) -> _Attempt:
        if self._attempt is None or self._attempt.done:
            raise RuntimeError("no step has begun: call start_quorum() first (Optimizer.zero_grad() does)")
        return self._attempt

    def _wait_plan(self) -> QuorumPlan:
        """The plan of this step. Raises what kept the quorum from forming."""
        attempt = self._current()
        if attempt.plan is None:
            assert attempt.ready is not None
            limit = attempt.timeout * (1 + self._settings.quorum_retries) + self._timeout.total_seconds() + SLACK
            try:
                attempt.plan = attempt.ready.result(limit)
            except Leaving as error:
                self._end_for(Drained(str(error)))
            except DisagreeError as error:
                with contextlib.suppress(TimeoutError, KeepstepError, OSError):
                    self._mesh.call(self._link.fail(str(error)), 1.0)
                self._end_for(GroupFailedExit(str(error)))
            except LayoutMismatch as error:
                difference = self._mesh.call(
                    first_layout_difference(error.peer_address, self._settings.token, self._layout), SLACK
                )
                self._end_for(LayoutMismatch(f"{error}. {difference}", error.peer_address))
            except Banned as error:
                self._end_for(EvictedExit(str(error)))
            except SessionClosed:
                self._raise_fatal()
                raise
        return attempt.plan

    def _exchange_state(self, attempt: _Attempt, plan: QuorumPlan) -> None:
        """Hands out live state to those who heal from this group, takes it in when this group heals."""
        if plan.destinations and not attempt.staged:
            attempt.staged = True
            try:
                self._state.stage(self._transport, list(plan.destinations), plan.max_step, self._timeout)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the joiner that goes without
                reason = f"{type(error).__name__}: {error}"
                self._log.error("nobody can heal from this group", step=self._step, reason=reason)
        if plan.source is not None and not attempt.heal_tried:
            attempt.heal_tried = True
            try:
                self._heal(plan, plan.source)
                attempt.healed = True
            except Exception as error:  # noqa: BLE001  whatever broke it, this step does not commit here
                self._report(attempt, error)
        if not plan.heal and isinstance(self._lineage, str) and self._lineage.startswith(TORN):
            self._end_for(
                KeepstepError(
                    "a broken heal left this group's state half written and no healthy group is there to heal from; "
                    "restart it from its last checkpoint"
                )
            )

    def _heal(self, plan: QuorumPlan, source: int) -> None:
        """Takes over the state of ``source`` as it was at ``max_step``."""
        started, seconds = time.monotonic(), self._timeout.total_seconds()
        member = plan.members[source]
        metadata = self._mesh.call(
            checkpoint_metadata(member.info.address, self._rank, self._settings.token, seconds), seconds + SLACK
        )

        def report(done: int, total: int, rate: float) -> None:
            self._mesh.loop.call_soon_threadsafe(self._link.healing, done, total, rate)

        try:
            received = self._state.receive(self._transport, source, metadata, plan.max_step, self._timeout, report)
            if self._step != plan.max_step:
                raise KeepstepError(f"{member.replica_id} sent step {self._step} instead of step {plan.max_step}")
        except BaseException as error:
            if not isinstance(error, TransferError) or error.torn:
                self.mark_torn()
            raise
        self._lineage = plan.lineage
        took = time.monotonic() - started
        self._log.info("healed", step=self._step, source=member.replica_id, bytes=received, seconds=round(took, 3))
        self._steps.write(
            *("healed", self._step, plan.quorum_id),
            epoch=plan.epoch,
            lineage=plan.lineage,
            seconds=took,
            bytes=received,
            source=member.replica_id,
        )

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> Work:
        """Reduces ``tensor`` in place over the groups that take part.

        Args:
            tensor: any shape, dense. A group that heals or stands by contributes zeros and gets the result all the
                same.
            should_quantize: not in this build: ValueError, never a silent full-precision reduction.
            reduce_op: AVG divides the sum by ``num_participants()``.

        Returns:
            A Work whose ``wait()`` gives False when this step cannot commit, and whose future gives ``tensor``. An
            error is reported, not raised.
        """
        if should_quantize:
            raise ValueError("this build of keepstep has no quantized all-reduce; call with should_quantize=False")
        average = reduce_op == ReduceOp.AVG
        if average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"an average of {tensor.dtype} would lose its fraction; use ReduceOp.SUM or a float tensor"
            )
        attempt = self._current()
        try:
            plan = self._wait_plan() if attempt.error is None else None
            if plan is None or self.errored() is not None:
                return ManagedWork(None, tensor, ok=False)
            rank, world = self._participation(attempt, plan)
            if rank is None:
                if reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
                    raise ValueError(f"{reduce_op} has no neutral contribution for a group that does not take part")
                tensor.zero_()
            options = dist.AllreduceOptions()
            options.reduceOp = ReduceOp.SUM if average else reduce_op  # type: ignore[assignment]
            options.timeout = self._timeout
            work = self._reconfigurer.pg.allreduce([tensor], options)
        except SystemExit as error:  # should_commit raises it: nothing may fly through the middle of a backward pass
            self._report(attempt, KeepstepError(f"leaving: {error}"))
            return ManagedWork(None, tensor, ok=False)
        except Exception as error:  # noqa: BLE001  reported: the step does not commit, training goes on
            self._report(attempt, error)
            return ManagedWork(None, tensor, ok=False)

        def divide() -> None:
            if average and world > 1:
                tensor.mul_(1 / world)  # as torch's DDP: three times as fast as a division

        managed = ManagedWork(work, tensor, divide, partial(self._report, attempt))
        attempt.works.append(managed)
        return managed

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether this step counts; then, and only then, step the optimizer.

        Waits for the collectives of the step, exchanges live state, and votes with the other ranks of the group.

        Raises:
            Drained, EvictedExit, LayoutMismatch: the group is to end.
            GroupFailedExit: the vote's outcome cannot be known.
            RuntimeError: more than ``max_retries`` steps in a row failed.
        """
        attempt = self._current()
        self._raise_fatal()
        limit = timeout or self._timeout
        plan: QuorumPlan | None = None
        try:
            plan = self._wait_plan()
        except (LayoutMismatch, SessionClosed):
            raise
        except Exception as error:  # noqa: BLE001  no quorum: every rank of the group learns the same
            self.report_error(error)
        decision = False
        if plan is not None:
            self._finish_works(attempt)
            if self._reconfigurer.device is not None:
                torch.cuda.current_stream().synchronize()
            if attempt.allow_heal:
                self._exchange_state(attempt, plan)
            decision = self._vote(attempt, plan, limit)
        self._settle(attempt, plan, decision)
        return decision

    def _finish_works(self, attempt: _Attempt) -> None:
        for work in attempt.works:
            if work.wait() and work.after is not None:
                try:
                    work.after()
                except Exception as error:  # noqa: BLE001  what it leaves behind is equal nowhere else
                    self._report(attempt, error)

    def _vote(self, attempt: _Attempt, plan: QuorumPlan, limit: timedelta) -> bool:
        participants = self._participation(attempt, plan)[1]
        if attempt.error is None and participants < self._min_replica_size:
            attempt.error = KeepstepError(
                f"{participants} groups take part, min_replica_size is {self._min_replica_size}"
            )
            self._log.warning("step will not commit", step=self._step, reason=str(attempt.error))
        ok = attempt.error is None
        if self._group_world_size == 1:
            return ok
        vote = RankVote(plan.epoch, plan.quorum_id, plan.max_step, attempt.number, ok)
        # others may wait for a collective and a heal (its address, its bytes) first; a death is noticed at once
        seconds = limit.total_seconds() + 3 * self._timeout.total_seconds()
        try:
            return self._mesh.call(self._link.vote(vote, seconds), seconds + SLACK)
        except (TimeoutError, KeepstepError, OSError) as error:
            reason = f"the commit decision of step {plan.max_step} cannot be known: {type(error).__name__}: {error}"
            with contextlib.suppress(TimeoutError, KeepstepError, OSError):
                self._mesh.call(self._link.fail(reason), 1.0)
            raise GroupFailedExit(reason) from error

    def _settle(self, attempt: _Attempt, plan: QuorumPlan | None, committed: bool) -> None:
        attempt.done = True
        self._link.finished_step()
        if committed and plan is not None:
            participants = self._participation(attempt, plan)[1]
            self._step += 1
            self._batches_committed += participants
            facts = {"epoch": plan.epoch, "participants": participants, "lineage": self._lineage}
            if not plan.heal or attempt.healed:  # else it took part as it was, and is still behind
                self._lineage = plan.quorum_id
            else:
                facts["behind"] = True
            self._commit_failures = 0
            self._steps.write("committed", self._step, plan.quorum_id, **facts)
            return
        self._commit_failures += 1
        epoch, quorum_id = (plan.epoch, plan.quorum_id) if plan else (0, 0)
        self._steps.write("discarded", self._step, quorum_id, epoch=epoch, reason=str(attempt.error))
        if self._max_retries is not None and self._commit_failures > self._max_retries:
            raise RuntimeError(
                f"{self._commit_failures} steps in a row failed (max_retries={self._max_retries}); the last one: "
                f"{attempt.error or 'another rank of this group voted no'}"
            )

    def _abandon(self, attempt: _Attempt) -> None:
        """A step that never came to ``should_commit`` (found_inf, an exception): nothing of it may reach the next.

        Peers that still wait for our part in it learn that it will not come.
        """
        with contextlib.suppress(Exception):  # it was not committed, so nobody asks why
            if self._wait_plan().replica_world_size > 1:
                self._reconfigurer.abort("this group abandoned the step")
        for work in attempt.works:
            work.wait()
        attempt.done = True
        self._link.finished_step()

    # ---- ends

    def _wish_to_leave(self, reason: str) -> None:
        if not self._leaving and not self._shut_down:
            self._leaving = reason
            self._mesh.loop.call_soon_threadsafe(self._link.wish_to_leave, reason)

    def _leave_and_raise(self) -> None:
        seconds = self._timeout.total_seconds()
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):  # who cannot say goodbye leaves all the same
            self._mesh.call(self._link.leave(self._leaving, min(seconds, 5.0)), seconds)
        self._end_for(Drained(self._leaving))

    def _end_for(self, error: BaseException) -> NoReturn:
        self._fatal = error
        raise error

    def _raise_fatal(self) -> None:
        if self._fatal is not None:
            raise self._fatal

    def _group_failed(self, reason: str) -> None:
        if not self._shut_down and self._group_world_size > 1:
            end_process(reason, EXIT_EVICTED if isinstance(self._fatal, EvictedExit) else EXIT_GROUP_FAILED)

    def _pushed(self, push: Push) -> None:
        """What the lighthouse says between answers. On the mesh thread."""
        if self._early is not None:
            self._early.append(push)
            return
        match push:
            case MemberLost():
                self._log.warning("member lost", member=push.replica_id, quorum_id=push.quorum_id, reason=push.reason)
                self._reconfigurer.lost(push.quorum_id, f"{push.replica_id} is lost: {push.reason}")
                if isinstance(self._transport, HTTPTransport) and self._heals_from(push.replica_id):
                    self._transport.abort_receive(f"the source {push.replica_id} is lost")
            case RoundBroken():
                self._log.warning("round broken", quorum_id=push.quorum_id, reason=push.reason)
                self._reconfigurer.lost(push.quorum_id, push.reason)
            case Drain():
                self._wish_to_leave(push.reason or "drained")
            case Evicted():
                self._fatal = EvictedExit(push.reason)
                self._reconfigurer.abort(f"evicted: {push.reason}")
            case _:
                pass

    def _heals_from(self, replica_id: str) -> bool:
        plan = self._attempt.answered if self._attempt is not None else None
        return plan is not None and plan.source is not None and plan.members[plan.source].replica_id == replica_id

    def _hear_early_pushes(self) -> None:
        early, self._early = self._early or [], None
        for push in early:
            self._pushed(push)

    def shutdown(self, wait: bool = True) -> None:
        """Says leave, frees threads, ports and memory. Twice is fine.

        In the middle of a step the group does not say leave: its peers must learn that it is lost.
        """
        if self._shut_down:
            return
        self._shut_down = True
        atexit.unregister(self.shutdown)
        self._termination.restore()
        limit = min(self._timeout.total_seconds(), 5.0)
        if self._fatal is None and not self._in_step():
            try:
                self._mesh.call(self._link.leave("shutdown", limit), limit + 1.0)
            except (TimeoutError, KeepstepError, OSError) as error:
                self._log.info("left without goodbye", reason=f"{type(error).__name__}: {error}")
        self._reconfigurer.shutdown()
        self._transport.shutdown(wait=wait)
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            self._mesh.call(self._link.close(), limit)
        self._mesh.stop()
        self._steps.close()

    def _in_step(self) -> bool:
        """Whether peers may count on our part in a step. A request that is not answered yet is withdrawn."""
        attempt = self._attempt
        if attempt is None or attempt.done or attempt.ready is None:
            return False
        if attempt.answered is None:
            attempt.ready.cancel()
        return attempt.answered is not None
