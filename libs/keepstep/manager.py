"""One training step of a replica group, in order.

    start_quorum    ask, and unless async wait; heal if this is a first step or the quorum is synchronous
    allreduce       wait for the quorum and the process group, contribute, average over who takes part
    should_commit   wait for what is in flight, hand out or take in live state, vote with the group's other ranks

Everything that talks runs on the mesh thread; everything that touches the user's state runs on the training thread.
``attempt.py`` has what one step does; here is what the script calls, and how a group comes and goes.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work
from torch.futures import Future

from keepstep.checkpointing.relayed.relay_transport import RelayTransport
from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.futures import future_timeout
from keepstep.group.agreement import group_settings, layout_digest
from keepstep.group.group_link import LinkSettings, connect_group
from keepstep.group.quorum_plan import WorldSizeMode
from keepstep.runtime import environment
from keepstep.runtime.exits import EXIT_EVICTED, EXIT_GROUP_FAILED, EvictedExit, TerminationFlag, end_process
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.step.attempt import Attempt
from keepstep.step.context import StepContext
from keepstep.step.live_state import LiveState
from keepstep.step.progress import GroupProgress
from keepstep.step.reconfigurer import Reconfigurer
from keepstep.step.step_log import StepLog
from keepstep.step.step_telemetry import StepTelemetry
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import Banned, Drained, KeepstepError
from keepstep_mesh.net.fork_safety import OfParent, never_free, tell_children
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.lineage import NEW
from keepstep_mesh.protocol.messages import Drain, Evicted, MemberLost, RoundBroken, ServiceAddress
from keepstep_mesh.security.tls import as_safe
from keepstep_mesh.session.session_events import Push

T = TypeVar("T")

__all__ = ["Manager", "WorldSizeMode"]

log = get_logger("keepstep.manager")

STREAMS = 4
"""Parallel streams of a heal without a relay; measured faster than one and than sixteen."""


class Manager:
    """Keeps one replica group in step with the others.

    All groups of a job must have the same ``use_async_quorum``, ``world_size_mode`` and ``init_sync``, and with
    ``FIXED_WITH_SPARES`` the same ``min_replica_size``; one that differs gets a LayoutMismatch.

    Args:
        pg: process group over the replica groups, one of ``keepstep.ProcessGroup*``; reconfigured as members change.
        load_state_dict, state_dict: the user's state, registered under "default"; None: register it later.
        min_replica_size: groups that must take part for a step to commit.
        use_async_quorum: True overlaps the quorum with the forward pass; a healing group then contributes zeros in its
            first step. False: everybody waits, heals, and takes part.
        timeout: of collectives and commit votes, and of a heal without progress (``KEEPSTEP_TIMEOUT_SEC``).
        quorum_timeout: of one request for a quorum (``KEEPSTEP_QUORUM_TIMEOUT_SEC``). After it the step fails or, where
            ``start_quorum`` waits for the quorum, the group asks again.
        connect_timeout: of reaching the lighthouse and the group's rank 0 (``KEEPSTEP_CONNECT_TIMEOUT_SEC``).
        rank, world_size: of this process within its group; default: RANK and WORLD_SIZE, else a group of one.
        world_size_mode: see ``WorldSizeMode``.
        store_addr, store_port: where the ranks of one group find each other; default: MASTER_ADDR and MASTER_PORT.
            Not used by a group of one.
        lighthouse_addr: ``http://host:port``, several separated by commas; default: ``KEEPSTEP_LIGHTHOUSE``.
        replica_id: stable name of the group; default: ``REPLICA_GROUP_ID`` (``r0`` for 0), else a random one of rank 0.
        port: of the group server on rank 0 (``KEEPSTEP_MANAGER_PORT``); default: any free one.
        hostname: to advertise; default: the address of the interface that reaches the lighthouse.
        heartbeat_interval: between heartbeats to the lighthouse, unless it asks for fewer.
        checkpoint_transport: how live state travels; default: ``RelayTransport``, which is direct where no relay is.
        init_sync: True: at the first step all groups take over the weights of one. False: they are equal already.
        max_retries: failed commits in a row after which ``should_commit`` raises; None: no limit.
        quorum_retries: how often a quorum that timed out is asked for again (``KEEPSTEP_QUORUM_RETRIES``).

    Raises:
        ValueError: an argument or variable makes no sense.
        TimeoutError: the lighthouse, or the group's rank 0, was not reached within ``connect_timeout``.
        KeepstepError: rank 0 cannot serve the group's store, or it is the store of another group.
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
        if max_retries is not None and max_retries < 0:
            raise ValueError(f"max_retries={max_retries} must be at least 0; None: no limit")
        self._use_async_quorum = use_async_quorum
        self._init_sync = init_sync
        self._max_retries = max_retries

        settings = LinkSettings.from_arguments(
            lighthouse_addr=lighthouse_addr,
            replica_id=replica_id,
            rank=environment.from_launcher("RANK", rank, 0),
            world_size=environment.from_launcher("WORLD_SIZE", world_size, 1),
            store_addr=store_addr,
            store_port=store_port,
            port=port,
            hostname=hostname,
            heartbeat_interval=heartbeat_interval.total_seconds(),
            connect_timeout=self._connect_timeout.total_seconds(),
            quorum_retries=environment.integer("QUORUM_RETRIES", quorum_retries),
        )
        self._pid = os.getpid()
        self._several_ranks = settings.world_size > 1
        self._attempt: Attempt | None = None
        self._requests = 0
        self._leaving = ""
        self._layout_digest = ""
        self._shut_down = False
        self._early: list[Push] | None = []
        """What was pushed before there was anything to act upon it; None from then on."""

        self._mesh = LoopThread()
        closing = contextlib.ExitStack()
        closing.callback(self._mesh.stop)
        with closing:
            # the store's server ends with its last reference, and other ranks may come to it late
            try:
                link, self._store = connect_group(self._mesh, settings, self._group_failed, self._pushed)
            except Banned as error:
                raise EvictedExit(str(error)) from error
            closing.callback(lambda: self._mesh.call(link.close(), CALL_MARGIN_SECONDS))
            transport = checkpoint_transport
            if transport is None:
                transport = RelayTransport(
                    timeout=self._timeout,
                    relays=self._relays,
                    num_chunks=STREAMS,
                    hostname=settings.host,
                    token=settings.token,
                    tls=settings.session.tls,
                    uplink=environment.rate("UPLINK_BYTES_PER_SECOND"),
                )
                closing.callback(transport.shutdown)
            progress = GroupProgress(link.replica_id, f"{NEW}{link.replica_id}" if init_sync else "")
            self._context = StepContext(
                mesh=self._mesh,
                link=link,
                settings=settings,
                reconfigurer=Reconfigurer(
                    pg,
                    job=settings.job,
                    replica_id=link.replica_id,
                    group_rank=settings.rank,
                    group_world_size=settings.world_size,
                    token=settings.token,
                    host=settings.host,
                    key_values=link.key_values,
                    own_address=link.address,
                    timeout=self._timeout,
                ),
                transport=transport,
                state=LiveState(progress.state_dict, progress.load),
                progress=progress,
                steps=StepLog(settings.job, link.replica_id, settings.rank),
                telemetry=StepTelemetry(self._mesh, link, settings),
                log=log.bind(replica_id=link.replica_id, rank=settings.rank),
                timeout=self._timeout,
                min_replica_size=min_replica_size,
                world_size_mode=world_size_mode,
                job_settings=group_settings(
                    use_async_quorum=use_async_quorum,
                    world_size_mode=world_size_mode,
                    min_replica_size=min_replica_size,
                    init_sync=init_sync,
                ),
            )
            if state_dict is not None and load_state_dict is not None:
                self.register_state_dict_fn("default", load_state_dict, state_dict)
            self._write("started")
            self._termination = TerminationFlag(self._wish_to_leave)
            tell_children(self)
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
        self._context.state.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """The user's state under "default", replacing what was registered there."""
        self._context.state.register("default", load_state_dict, state_dict, replace=True)

    def allow_state_dict_read(self) -> None:
        """Ends ``disallow_state_dict_read``."""
        self._context.state.readable = True

    def disallow_state_dict_read(self) -> None:
        """Until allowed again no healing group is given this state: it is in the middle of a change."""
        self._context.state.readable = False

    def add_layout(self, lines: list[str]) -> None:
        """More of what all groups must have in common, one line a parameter or bucket; each DDP adds its module's.

        A group whose lines, in their order, differ from the job's is refused, with the first difference named.
        """
        self._context.layout = [*self._context.layout, *lines]
        self._layout_digest = layout_digest(self._context.job_settings, self._context.layout)
        self._context.link.layout_lines = self._context.layout

    def state_dict(self) -> dict[str, Any]:
        """For the user's own checkpoint: step, batches_committed and, once there is one, the lineage."""
        return self._context.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From the user's own checkpoint; takes torchft's too (no lineage).

        Once groups that loaded one have committed a step, a group that was away since before that heals from them, even
        from a lower step: it does not undo the resume.
        """
        self._context.progress.resume(state_dict)
        self._write("loaded")

    def _write(self, event: str) -> None:
        self._context.steps.write(event, self._context.progress.step, 0, lineage=self._context.progress.lineage)

    def mark_torn(self) -> None:
        """This group's state is of no step any more (a heal or an optimizer broke in the middle).

        It heals from another group at the next step, and never counts as a state that others could heal from.
        """
        self._context.tear()

    def record(self, **values: float) -> None:
        """Numbers to be seen beside the steps, such as ``record(loss=loss.item())``: with the step that ends next.

        At most 16 names. Those of rank 0 are sent to the metrics service, in the background; without one it is free.
        """
        self._context.telemetry.values({name: float(value) for name, value in values.items()})

    # ---- facts of the step

    def current_step(self) -> int:
        """Steps committed so far; changes only in ``should_commit`` and with a heal."""
        return self._context.progress.step

    def batches_committed(self) -> int:
        """Batches of all groups that went into committed steps."""
        return self._context.progress.batches_committed

    def replica_id(self) -> str:
        """This incarnation of the group: ``name:uuid``."""
        return self._context.link.replica_id

    @property
    def services(self) -> tuple[ServiceAddress, ...]:
        """Where relays and the metrics service are: what registered with the lighthouse and is there now."""
        return self._context.link.services

    def _relays(self) -> list[str]:
        asked = self._context.settings.session.addresses[0]
        return [as_safe(one.address, asked) for one in self.services if one.service == "relay"]

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
        if attempt is None or not attempt.done or attempt.plan is None:
            attempt = self._current()
        return attempt.participation(attempt.plan or attempt.wait_plan())

    # ---- errors

    def report_error(self, e: Exception) -> None:
        """This step will not commit. The process group is aborted, so that nobody waits for us."""
        if self._attempt is not None:
            self._attempt.report(e)

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
                    attempt.report(error)
                return default

        return future_timeout(fut, timeout or self._timeout).then(value_or_default)

    # ---- a step

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step.

        Continue the open step instead if the arguments are the same and nothing has been reduced in it; any other open
        step is discarded.

        Where it waits (a synchronous quorum, a group's first step) and no quorum forms within ``quorum_timeout``, it
        logs the reason and asks again, until there is one.

        Args:
            allow_heal: False: a group that is behind takes part as it is (LocalSGD's sync points). So it is in every
                group of a round when one of them asks so.
            shrink_only: take no new groups in.
            timeout: for the quorum, instead of ``quorum_timeout``; after it TimeoutError instead of asking again.

        Raises:
            Drained: the group was asked to leave, and has.
            TimeoutError: where it waits, if ``timeout`` is given: why there is no quorum; the next call asks again.
            KeepstepError: where it waits, what went wrong; the next call asks again.
        """
        context, progress = self._context, self._context.progress
        context.raise_fatal()
        limit = (timeout or self._quorum_timeout).total_seconds()
        arguments = (allow_heal, shrink_only, limit, self._layout_digest)
        if self._attempt is not None and not self._attempt.done:
            if self._attempt.arguments == arguments and self._attempt.is_untouched():
                return
            self._attempt.abandon()
        self._attempt = attempt = Attempt(
            context,
            allow_heal=allow_heal,
            sync=not self._use_async_quorum or not allow_heal,
            first_step=self._init_sync and progress.step == 0,
            timeout=limit,
            arguments=arguments,
        )
        while True:
            if self._leaving and not self._several_ranks:
                self._leave_and_raise()
            ask = self._next_ask(limit, allow_heal=allow_heal, shrink_only=shrink_only)
            try:
                attempt.begin(ask)
                break
            except TimeoutError as error:
                if timeout is not None or ask.leaving or not attempt.quorum_failed:
                    raise
                context.raise_fatal()
                context.log.warning("no quorum yet; asking again", step=progress.step, reason=str(error))

    def _next_ask(self, limit: float, *, allow_heal: bool, shrink_only: bool) -> RankAsk:
        context, progress = self._context, self._context.progress
        self._requests += 1
        return RankAsk(
            request=self._requests,
            step=progress.step,
            lineage=progress.lineage,
            shrink_only=shrink_only,
            commit_failures=max(progress.commit_failures, 1 if context.reconfigurer.broken else 0),
            timeout_ms=max(1, round(limit * 1000)),
            leaving=self._leaving,
            layout=self._layout_digest,
            checkpoint=context.transport.metadata(),
            root=context.root,
            batches_committed=progress.batches_committed,
            allow_heal=allow_heal,
            settings=context.job_settings,
        )

    def wait_quorum(self) -> None:
        """Waits until the quorum is there and the process group fits it. Raises what went wrong."""
        self._current().wait_plan()
        error = self.errored()
        if error is not None:
            raise error

    def _current(self) -> Attempt:
        if self._attempt is None or self._attempt.done:
            raise RuntimeError("no step has begun: call start_quorum() first (Optimizer.zero_grad() does)")
        return self._attempt

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
            reduce_op: AVG divides the sum by ``num_participants()``; float16 is divided before it is added, so that the
                sum does not overflow. SUM of booleans is a logical or.

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
        return self._current().allreduce(tensor, reduce_op, average=average)

    def mark_synchronized(self) -> None:
        """Says that the state that this step commits is equal in all groups that take part, whatever it was before.

        For algorithms that average the parameters (or take all of them from one group) in a step in which nobody heals,
        ``start_quorum(allow_heal=False)``. Call it after ``start_quorum``, before ``should_commit``, in every group; it
        has no effect unless the step commits here. A group that was behind then counts as equal to the others: its step
        and ``batches_committed`` become theirs, and it does not heal. Without it such a group heals in the next step
        that allows it.

        It is not checked. **Everything** that is registered as state has to be equal after the step, bit for bit:
        parameters, buffers, state of optimizers. What differs stays different until ``keepstep verify-replicas`` finds
        it. Groups that call it and groups that do not never count as equal after the step: some of them heal.
        """
        self._current().synchronized = True

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Whether this step counts; then, and only then, step the optimizer.

        Waits for the collectives of the step, exchanges live state, and votes with the other ranks of the group.

        Raises:
            Drained, EvictedExit, LayoutMismatch: the group is to end.
            GroupFailedExit: the vote's outcome cannot be known.
            RuntimeError: more than ``max_retries`` steps in a row failed.
        """
        attempt = self._current()
        self._context.raise_fatal()
        committed = attempt.conclude(timeout or self._timeout)
        failures = self._context.progress.commit_failures
        if not committed and self._max_retries is not None and failures > self._max_retries:
            raise RuntimeError(
                f"{failures} steps in a row failed (max_retries={self._max_retries}); the last one: {attempt.error}"
            )
        return committed

    # ---- ends

    def _wish_to_leave(self, reason: str) -> None:
        if not self._leaving and not self._shut_down:
            self._leaving = self._context.leaving = reason
            self._mesh.loop.call_soon_threadsafe(self._context.link.wish_to_leave, reason)

    def _leave_and_raise(self) -> None:
        seconds = self._timeout.total_seconds()
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):  # who cannot say goodbye leaves all the same
            self._mesh.call(self._context.link.leave(self._leaving, min(seconds, 5.0)), seconds)
        self._context.end_with(Drained(self._leaving))

    def _group_failed(self, reason: str) -> None:
        if not self._shut_down and self._several_ranks:
            evicted = self._early is None and isinstance(self._context.fatal, EvictedExit)
            end_process(reason, EXIT_EVICTED if evicted else EXIT_GROUP_FAILED)

    def _pushed(self, push: Push) -> None:
        """What the lighthouse says between answers. On the mesh thread."""
        if self._early is not None:
            self._early.append(push)
            return
        match push:
            case MemberLost():
                self._context.log.warning(
                    "member lost", member=push.replica_id, quorum_id=push.quorum_id, reason=push.reason
                )
                self._context.reconfigurer.lost(push.quorum_id, f"{push.replica_id} is lost: {push.reason}")
                if self._heals_from(push.replica_id):
                    self._context.transport.source_lost(f"{push.replica_id}: {push.reason}")
            case RoundBroken():
                self._context.log.warning("round broken", quorum_id=push.quorum_id, reason=push.reason)
                self._context.reconfigurer.lost(push.quorum_id, push.reason)
            case Drain():
                self._wish_to_leave(push.reason or "drained")
            case Evicted():
                self._context.fatal = EvictedExit(push.reason)
                self._context.reconfigurer.abort(f"evicted: {push.reason}")
            case _:
                pass

    def forked(self) -> None:
        """In a forked child. Of no use there: only the parent has the threads."""
        if not self._shut_down:
            self._shut_down = True
            atexit.unregister(self.shutdown)
            self._termination.restore()
            never_free(self._context, self._attempt, self._store)
            self._context = self._attempt = cast("Any", OfParent("this Manager", self._pid))

    def _heals_from(self, replica_id: str) -> bool:
        plan = self._attempt.answered if self._attempt is not None else None
        return plan is not None and plan.source is not None and plan.members[plan.source].replica_id == replica_id

    def _hear_early_pushes(self) -> None:
        early, self._early = self._early or [], None
        for push in early:
            self._pushed(push)

    def shutdown(self, wait: bool = True) -> None:
        """Says leave, frees threads, ports and memory. Twice is fine.

        In the middle of a step the group does not say leave: its peers must learn that it is lost. Its other ranks end.
        """
        if self._shut_down:
            return
        self._shut_down = True
        atexit.unregister(self.shutdown)
        self._termination.restore()
        limit = min(self._timeout.total_seconds(), 5.0)
        in_step = self._attempt is not None and self._attempt.is_in_flight()
        if in_step and self._attempt is not None:
            self._attempt.refuse_joiners("this group ended in the middle of a step")
        if self._context.fatal is None and not in_step:
            try:
                self._mesh.call(self._context.link.leave("shutdown", limit), limit + 1.0)
            except (TimeoutError, KeepstepError, OSError) as error:
                self._context.log.info("left without goodbye", reason=f"{type(error).__name__}: {error}")
        elif in_step and self._several_ranks:
            self._context.fail_group(f"rank {self._context.settings.rank} ended in the middle of a step")
        self._context.reconfigurer.shutdown()
        self._context.transport.shutdown(wait=wait)
        self._context.telemetry.close()
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
            self._mesh.call(self._context.link.close(), limit)
        self._mesh.stop()
        self._store = None
        self._context.steps.close()
