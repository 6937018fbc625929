"""The Manager, which training scripts call: begin a step, average over the groups, commit.

    start_quorum    request the quorum; wait for it and heal in a synchronous or first step
    allreduce       wait for the quorum and the process group, then average over the groups that take part
    should_commit   wait for the collectives, exchange live state, vote with the other ranks of the group

Everything that communicates runs on the event-loop thread; everything that touches the user's state runs on the
training thread. ``step/attempt.py`` has the course of a step, ``lifecycle/`` how a group comes and goes.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, Work
from torch.futures import Future

from keepstep.futures import future_timeout
from keepstep.group.quorum_plan import WorldSizeMode
from keepstep.quantization.fused import check_quantizable
from keepstep.runtime import environment
from keepstep.runtime.devices import refuse_capture
from keepstep.runtime.exits import script_error
from keepstep.step.reduction import Reduction
from keepstep.step.retrying.kept_reductions import BATCH_BY_NUMBER, KeptReductions
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.fork_safety import OfParent, never_free, tell_children
from keepstep_mesh.threads.starting import reserve_for_exit

if TYPE_CHECKING:
    from keepstep.checkpoint.managed.durable_writer import LastCheckpoint
    from keepstep.checkpointing.transport import CheckpointTransport
    from keepstep.collectives.codecs.codec import Round
    from keepstep.lifecycle.background_quorum import BackgroundQuorum
    from keepstep.lifecycle.finishing import Finished
    from keepstep.lifecycle.steps import Steps
    from keepstep.script_checks.script_checker import ScriptChecker
    from keepstep_mesh.protocol.messages import ServiceAddress

T = TypeVar("T")

__all__ = ["Manager", "WorldSizeMode", "running_managers"]

_running: list[Manager] = []


def running_managers() -> list[Manager]:
    """Return the Managers of this process that are not shut down, for launchers that run a script in a thread."""
    return list(_running)


SHUTDOWN_SECONDS = 5.0
"""Limit of each part of ``shutdown`` that waits for the group or the lighthouse."""


class Manager:
    """Keeps one replica group in step with the others.

    ``use_async_quorum``, ``world_size_mode``, ``init_sync``, ``refuse_nonfinite`` and ``retry_allreduce``, and with
    ``FIXED_WITH_SPARES`` also ``min_replica_size``, must be equal in all groups of a job. A group with other values
    gets a MismatchExit.

    Args:
        pg: process group over the replica groups, one of ``keepstep.ProcessGroup*``. The Manager reconfigures it as
            members change.
        load_state_dict: loads the user's state; registered under "default" together with ``state_dict``.
        state_dict: returns the user's state. None: register states later, with ``register_state_dict_fn``.
        min_replica_size: number of groups that must take part for a step to commit.
        use_async_quorum: True: the quorum overlaps the forward pass; a group that heals contributes zeros in its first
            step. False: all groups wait for the quorum and for heals, and take part.
        timeout: of a collective, of a commit vote, and of a heal without progress (``KEEPSTEP_TIMEOUT_SEC``).
        quorum_timeout: of one request for a quorum (``KEEPSTEP_QUORUM_TIMEOUT_SEC``). After it the step fails; where
            ``start_quorum`` waits for the quorum, the group asks again.
        connect_timeout: of the first connection to the lighthouse and to the group's rank 0
            (``KEEPSTEP_CONNECT_TIMEOUT_SEC``).
        rank: of this process within its group; default: ``RANK``, else 0.
        world_size: number of ranks in the group; default: ``WORLD_SIZE``, else 1.
        world_size_mode: see ``WorldSizeMode``.
        store_addr: host of the store where the ranks of one group find each other; default: ``MASTER_ADDR``. Not used
            by a group of one rank.
        store_port: its port; default: ``MASTER_PORT``.
        lighthouse_addr: ``http://host:port``, several separated by commas; default: ``KEEPSTEP_LIGHTHOUSE``.
        replica_id: stable name of the group; default: ``REPLICA_GROUP_ID`` (``r0`` for 0), else rank 0 makes one up.
        port: of the group server on rank 0; default: ``KEEPSTEP_MANAGER_PORT``, else any free one.
        hostname: to advertise; default: the address of the interface that reaches the lighthouse.
        heartbeat_interval: between heartbeats to the lighthouse, unless the lighthouse asks for fewer.
        checkpoint_transport: moves live state to groups that heal; default: ``RelayTransport``, which sends it directly
            where no relay is registered.
        init_sync: True: at the first step all groups load the weights of one group. False: they are equal already.
        max_retries: number of failed steps in a row after which ``should_commit`` raises; None: no limit.
        quorum_retries: number of times that a quorum that timed out is requested again (``KEEPSTEP_QUORUM_RETRIES``).
        refuse_nonfinite: True: a step whose average or sum has a NaN or an infinity does not commit in any group, and
            counts for ``max_retries``. Not with a ``GradScaler``, which must see infinities to lower its scale.
        retry_allreduce: True: a step in which a member is lost is not discarded. The groups that are left reduce their
            gradients again and commit it without the lost group (``KEEPSTEP_RETRY_ALLREDUCE``). Costs a copy of the
            gradients; in a group of several ranks also a message of each rank in each backward pass.
        durable_every: number of steps between two durable checkpoints, equal in all groups; 0: none
            (``KEEPSTEP_DURABLE_EVERY``). docs/durable.md has what they hold and guarantee.
        resume: True: if no group has a live state, this one loads the newest durable checkpoint before its first step.
            Default: the same with ``durable_every``; else only ``resume()`` does (``KEEPSTEP_RESUME``). False: never.
        durable_relays: addresses of the relays that store durable checkpoints, separated by commas
            (``KEEPSTEP_DURABLE_RELAYS``). Default: those that are registered with the lighthouse.
        durable_copies: number of relays that store each of them (``KEEPSTEP_DURABLE_COPIES``).
        durable_newest_wins: what happens to a checkpoint that is due while an earlier one is uploaded and another one
            waits. True: it replaces the one that waits. False: the step waits for the upload, at most ``timeout``
            (``KEEPSTEP_DURABLE_NEWEST_WINS``).
        resume_wait: how long a resume waits for relays that do not answer and may have a newer durable checkpoint than
            the others: ``durable_copies`` of them, or more (``KEEPSTEP_RESUME_WAIT_SEC``).
        on_step: called with the scalars of each committed step and the number of committed steps, for TensorBoard, W&B,
            and the like (docs/telemetry.md): what ``record`` got, and ``keepstep/seconds`` and others. On the training
            thread, in ``should_commit``; an error of it is logged, and changes nothing.

    Raises:
        ValueError: an argument or variable is missing or out of range.
        TimeoutError: the lighthouse, or the group's rank 0, could not be reached within ``connect_timeout``.
        KeepstepError: rank 0 cannot serve the group's store, or the store belongs to another group.
        EvictedExit: the group is banned.
        PreflightExit: this machine failed a check.
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
        refuse_nonfinite: bool = False,
        retry_allreduce: bool = False,
        durable_every: int = 0,
        resume: bool | None = None,
        durable_relays: str | None = None,
        durable_copies: int = 1,
        durable_newest_wins: bool = False,
        resume_wait: timedelta = timedelta(seconds=30),
        on_step: Callable[[dict[str, float], int], None] | None = None,
        preflight: Sequence[str] | None = None,
    ) -> None:
        if (state_dict is None) != (load_state_dict is None):
            missing = "state_dict" if state_dict is None else "load_state_dict"
            raise ValueError(f"{missing} is missing: a heal needs both functions; pass both or none")
        # loaded with the first Manager, with all that communicates: an import of keepstep costs little more than torch
        from keepstep.group.group_link import LinkSettings
        from keepstep.lifecycle import wiring
        from keepstep.lifecycle.background_quorum import BackgroundQuorum
        from keepstep.lifecycle.durability import Durability
        from keepstep.lifecycle.finishing import Finishing
        from keepstep.lifecycle.manager_settings import DurableSettings, ManagerSettings
        from keepstep.lifecycle.membership import GroupMembership
        from keepstep.lifecycle.steps import Steps
        from keepstep.script_checks.script_checker import ScriptChecker
        from keepstep.step.reconfigurer import check_changeable

        check_changeable(pg)
        self._settings = ManagerSettings(
            link=LinkSettings.from_arguments(
                lighthouse_addr=lighthouse_addr,
                replica_id=replica_id,
                rank=environment.from_launcher("RANK", rank, 0),
                world_size=environment.from_launcher("WORLD_SIZE", world_size, 1),
                store_addr=store_addr,
                store_port=store_port,
                port=port,
                hostname=hostname,
                heartbeat_interval=heartbeat_interval.total_seconds(),
                connect_timeout=environment.seconds("CONNECT_TIMEOUT_SEC", connect_timeout).total_seconds(),
                quorum_retries=environment.integer("QUORUM_RETRIES", quorum_retries),
                preflight=preflight,
            ),
            durable=DurableSettings.from_arguments(
                durable_every=durable_every,
                resume=resume,
                durable_relays=durable_relays,
                durable_copies=durable_copies,
                durable_newest_wins=durable_newest_wins,
                resume_wait=resume_wait,
            ),
            timeout=environment.seconds("TIMEOUT_SEC", timeout),
            quorum_timeout=environment.seconds("QUORUM_TIMEOUT_SEC", quorum_timeout),
            min_replica_size=min_replica_size,
            use_async_quorum=use_async_quorum,
            world_size_mode=world_size_mode,
            init_sync=init_sync,
            max_retries=max_retries,
            refuse_nonfinite=refuse_nonfinite,
            retry_allreduce=bool(environment.flag("RETRY_ALLREDUCE", retry_allreduce)),
            uplink=environment.rate("UPLINK_BYTES_PER_SECOND"),
        )
        self._pid = os.getpid()
        settings, link = self._settings, self._settings.link
        self._membership = GroupMembership(link)
        self._context = context = wiring.connect(settings, pg, checkpoint_transport, self._membership, on_step)
        self._durability = Durability(settings, context)
        self._checker = ScriptChecker(context.state, context.log, link.rank, link.world_size)
        self._steps = Steps(settings, context, self._membership, self._durability, self._checker)
        self._background = BackgroundQuorum(settings, context, self._steps)
        self._finishing = Finishing(settings, context, self._membership, self._durability, self._steps)
        if settings.retry_allreduce:
            context.kept = KeptReductions(self._checker.gradients)
        if state_dict is not None and load_state_dict is not None:
            self.register_state_dict_fn("default", load_state_dict, state_dict)
        context.log_progress("started")
        _running.append(self)
        tell_children(self)
        self._membership.start(context)
        atexit.register(self._exit)  # a script that just ends leaves the job too
        reserve_for_exit()

    # ---- parts, for DDP, optimizers, samplers, LocalSGD and DiLoCo of keepstep

    @property
    def steps(self) -> Steps:
        """The steps of this process: which one is open, and how it began."""
        return self._steps

    @property
    def background(self) -> BackgroundQuorum:
        """Quorums that form while the group trains."""
        return self._background

    @property
    def script_checker(self) -> ScriptChecker:
        """Warns of mistakes of the script, and compares it with those of other groups. Each DDP adds itself."""
        return self._checker

    # ---- facts of the step

    @property
    def use_async_quorum(self) -> bool:
        """Whether the quorum overlaps the forward pass."""
        return self._settings.use_async_quorum

    @property
    def init_sync(self) -> bool:
        """Whether all groups load the weights of one group at the first step."""
        return self._settings.init_sync

    @property
    def refuse_nonfinite(self) -> bool:
        """Whether a step with a NaN or an infinity does not commit."""
        return self._settings.refuse_nonfinite

    @property
    def retry_allreduce(self) -> bool:
        """Whether the other groups repeat a step in which a member is lost, with the same gradients."""
        return self._context.kept is not None

    def participating_rank(self) -> int | None:
        """Wait for the quorum, and return this group's number among the groups that take part.

        After ``should_commit``, this and ``num_participants`` and ``is_participating`` are of the step that ended. In a
        step, a script may draw its batch by this number. Then the step is not retried (``retry_allreduce``): among
        fewer groups the numbers are others, and one batch would be trained on twice and another one never.

        Returns:
            In [0, num_participants()); None while this group heals or is a spare, without a quorum, and before the
            first step.
        """
        rank = self._participation()[0]
        if self._context.kept is not None:
            self._context.kept.refuse(BATCH_BY_NUMBER)
        return rank

    def num_participants(self) -> int:
        """Wait for the quorum, and return the number of groups that take part in this step.

        0 without a quorum, and before the first step.
        """
        return self._participation()[1]

    def is_participating(self) -> bool:
        """Wait for the quorum, and return whether this group takes part in this step."""
        return self._participation()[0] is not None

    def _participation(self) -> tuple[int | None, int]:
        return (None, 0) if self._steps.attempt is None else self._steps.participation()

    def is_healing(self) -> bool:
        """Wait for the quorum, and return whether this group loads the state of another one in ``should_commit``."""
        return self._steps.current().heals_at_end()

    # ---- errors

    def report_error(self, e: Exception) -> None:
        """Keep this step from committing, and abort the process group so that no other group waits for this one.

        Args:
            e: the reason, for the log.
        """
        if self._steps.attempt is not None:
            self._steps.attempt.report(e)

    def errored(self) -> Exception | None:
        """Return the error of this step, or of the last one until the next begins; None without an error."""
        attempt = self._steps.attempt
        return None if attempt is None else (attempt.after or attempt).error

    def wrap_future(self, fut: Future[T], default: T, timeout: timedelta | None = None) -> Future[T]:
        """Return a future that reports an error of ``fut`` and completes with ``default`` instead of raising it.

        Wait for it before ``should_commit``: an error that is reported later has no effect on this step or the next.

        Args:
            fut: any future of torch.
            default: the value when ``fut`` fails or is late.
            timeout: default: ``timeout`` of the Manager.
        """
        attempt = self._steps.attempt

        def value_or_default(source: Future[T]) -> T:
            try:
                return source.value()
            except Exception as error:  # noqa: BLE001  any error means that the step does not commit
                if attempt is not None:
                    attempt.report(error)
                return default

        return future_timeout(fut, timeout or self._settings.timeout).then(value_or_default)

    # ---- a step

    def section(self, name: str, limit: timedelta = timedelta(hours=1)) -> contextlib.AbstractContextManager[None]:
        """Declare a part of the script that takes longer than a step, such as an evaluation.

        The lighthouse ends a group whose step takes unusually long (``hang_after`` of the policy). In a section this
        holds only after ``limit``, and `keepstep quorum --explain` names the section. Sections may be nested: the
        innermost one counts. Costs a few microseconds::

            with manager.section("evaluate"):
                evaluate(model)

        Args:
            name: for operators.
            limit: of the section.
        """
        return self._context.link.activity.section(name, limit.total_seconds())

    @contextlib.contextmanager
    def rehearse(self) -> Iterator[None]:
        """Run a step of the script in this context before the first quorum, and undo it.

        The first forward and backward pass compiles, tunes kernels, allocates memory and starts the workers of loaders.
        In a rehearsal this takes place before the group joins a step, so that no other group waits for it::

            with manager.rehearse():
                optimizer.zero_grad()
                loss_of(ddp, a_batch).backward()
                optimizer.step()

        No other group takes part: collectives have the result of a group that is alone. ``should_commit`` and
        ``Optimizer.step`` return False, and ``Optimizer`` steps its inner optimizer. At the end, also after an error,
        these are as before: parameters, buffers and gradients of modules in ``DistributedDataParallel``, state of
        optimizers in ``Optimizer``, tensors of registered states, and the random generators of Python, numpy and torch.
        The position of an ``ElasticSampler`` does not move; a loader of the script's own has moved on, so give it a
        batch of its own. Needs main memory for a copy of these tensors.

        Not inside of LocalSGD, DiLoCo, or ``keepstep.outer``.

        Raises:
            RuntimeError: this process has begun a step.
        """
        with self._steps.rehearse():
            yield

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Begin a step.

        Continue the open step instead if the arguments are the same and nothing has been reduced in it. Discard any
        other open step; one for which an ``ElasticSampler`` has drawn a batch stays open, and ``should_commit``
        discards it.

        In a synchronous quorum and in a group's first step this waits for the quorum. If none forms within
        ``quorum_timeout``, it logs the reason and asks again.

        Args:
            allow_heal: False: a group that is behind takes part as it is. One group that asks so decides it for all
                groups of the quorum. No effect once a group of it finishes.
            shrink_only: take no new groups into the quorum.
            timeout: of the quorum, instead of ``quorum_timeout``; after it TimeoutError instead of asking again.

        Raises:
            Drained: the group was asked to leave the job, and has left.
            TimeoutError: no quorum formed within ``timeout``; the next call asks again. Only where this waits.
            KeepstepError: any other reason why no quorum formed; the next call asks again. Only where this waits.
            RuntimeError: three steps in a row were begun, and not ended with ``should_commit``.
        """
        self._steps.start(allow_heal=allow_heal, shrink_only=shrink_only, timeout=timeout)

    def wait_quorum(self) -> None:
        """Wait for the quorum and for the process group.

        Raises:
            Exception: the reason why no quorum formed, or why the process group could not be built.
        """
        self._steps.current().wait_plan()
        error = self.errored()
        if error is not None:
            raise error

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp | ReduceOp.RedOpType = ReduceOp.AVG,
        *,
        write_back: Callable[[], None] | None = None,
        refill: Callable[[], None] | None = None,
    ) -> Work:
        """Reduce ``tensor`` in place over the groups that take part.

        It may be called after ``should_commit`` too, for a value to log: the groups that took part in the step reduce
        it, and an error does not change what the step decided. All groups must call it equally often.

        Args:
            tensor: dense, of any shape. A group that heals or is a spare contributes the neutral element of
                ``reduce_op``, such as 0 to a sum, and gets the result.
            should_quantize: send 8-bit values, a quarter of the bytes; see ``keepstep.collectives``. All groups must
                give the same value. Only SUM and AVG of floats.
            reduce_op: AVG divides the sum by ``num_participants()``: float16 and float32 before the sum, which cannot
                overflow then. SUM of booleans is a logical or.
            write_back: called on this thread in ``should_commit``, after all passes, if the collective succeeded.
            refill: with ``retry_allreduce``, called before the collective is repeated among fewer groups, to write this
                group's contribution to ``tensor`` again. None: the value that ``tensor`` had is copied and restored.

        Returns:
            A Work. Its ``wait()`` returns False when this step cannot commit; its future completes with ``tensor``. An
            error of the collective is reported (``errored``), not raised.

        Raises:
            ValueError: an average of integers, or a quantized reduction other than SUM and AVG of floats.
            RuntimeError: no step has begun, or a CUDA graph is being captured.
        """
        refuse_capture((tensor,))
        if (op := getattr(reduce_op, "op", None)) not in (None, ReduceOp.PREMUL_SUM):
            reduce_op = op  # the object in torch's options equals its name, and is in no tuple of names
        if should_quantize:
            check_quantizable([tensor], reduce_op)
        average = reduce_op == ReduceOp.AVG
        if average and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(
                f"an average of {tensor.dtype} would lose its fraction; use ReduceOp.SUM or a float tensor"
            )
        attempt = self._steps.attempt or self._steps.current()
        reduction = Reduction(tensor, reduce_op, average, write_back, should_quantize, refill)
        return (attempt.after or attempt).allreduce(reduction)

    def run_collective(self, tensors: list[torch.Tensor], start: Callable[[Round], Work]) -> Work:
        """Average tensors in place over the groups that take part, in a way of the caller's own. Codecs use this.

        Args:
            tensors: float tensors that ``start`` averages.
            start: starts the average on the process group of the round, and returns its work. A group that does not
                contribute must send zeros.

        Returns:
            A Work, as of ``allreduce``. Its future completes with ``tensors``.

        Raises:
            RuntimeError: no step has begun, or a CUDA graph is being captured.
        """
        refuse_capture(tensors)
        return self._steps.current().run_collective(tensors, start)

    def mark_synchronized(self) -> None:
        """Declare that this step makes the registered state equal in all groups that take part.

        For algorithms that average the parameters, or load them from one group, in a step without heals
        (``start_quorum(allow_heal=False)``). Call it in every group between ``start_quorum`` and ``should_commit``. It
        has an effect only if the step commits: a group that was behind then counts as equal to the others, so its step
        and ``batches_committed`` become theirs, and it does not heal. Otherwise such a group heals in the next step
        that allows it.

        Nothing checks the declaration. After the step **all** registered state must be equal bit for bit: parameters,
        buffers, state of optimizers. A difference stays until ``keepstep verify-replicas`` finds it. A group
        that calls this and a group that does not never count as equal after the step; some of them heal.
        """
        self._steps.current().synchronized = True

    @contextlib.contextmanager
    def committing(self, timeout: timedelta | None = None) -> Iterator[bool]:
        """End the step, and guard the change of the weights in the block::

            with manager.committing() as committed:
                if committed:
                    optimizer_d.optim.step()
                    optimizer_g.optim.step()

        A committed step counts, so the weights must change with it. From the commit to the end of the block, signals
        are held back, such as Ctrl-C and SIGTERM; their handlers run right after the block. A second Ctrl-C or SIGTERM
        is handled at once. After an error in the block the state is torn: this group heals from another one at the
        next step, and no group heals from it. Put nothing else into the block, in which no state can be read.

        Args:
            timeout: as of ``should_commit``.

        Returns:
            Whether the step commits, as of ``should_commit``.

        Raises:
            Exception: as ``should_commit``, and as the block.
        """
        context = self._context
        try:
            committed = self._steps.conclude(timeout or self._settings.timeout)
            if committed:
                self.disallow_state_dict_read()
            yield committed
        except BaseException:
            if context.signals.holding:  # the step counts, and no other group has these weights
                self.mark_torn()
            raise
        finally:
            if context.signals.holding:
                self.allow_state_dict_read()
            context.signals.release()

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """End the step, and return whether it commits. Step the optimizer only if it does.

        Wait for the collectives of the step, exchange live state with other groups, and vote with the other ranks of
        this group. Prefer ``committing``: an error or a Ctrl-C between this and the end of the change of the weights
        leaves a step that counts and weights that did not move.

        Another call without a ``start_quorum`` in between begins a step of its own, with the arguments of the last one:
        nothing is reduced in it, it takes a quorum of its own, and it is discarded if the last one was.

        Args:
            timeout: of the vote; default: ``timeout`` of the Manager.

        Raises:
            Drained, EvictedExit, MismatchExit: the process must end.
            StateMismatchExit: the state of the other groups does not fit this one, and the process must end.
            CollectivesExit: other groups began another number of collectives, and the process must end.
            GroupFailedExit: the outcome of the vote is unknown, and the process must end.
            RuntimeError: no step has begun; more than ``max_retries`` steps in a row failed; or three in a row failed
                with the same error of this group, which is the cause of this one.
        """
        committed = False
        self._steps.begin_again()
        try:
            with self.committing(timeout) as committed:
                pass
        except BaseException:
            if committed:  # a signal came after the commit, and the weights have not changed
                self.mark_torn()
            raise
        return committed

    # ---- state and progress

    def register_state_dict_fn(
        self,
        key: str,
        load_state_dict: Callable[[T], None],
        state_dict: Callable[[], T],
    ) -> None:
        """Register a named part of the user's state, which heals together with all other parts.

        Args:
            key: name of the part, equal in all groups.
            load_state_dict: loads what ``state_dict`` of another group returned.
            state_dict: returns the part: tensors, and containers of tensors and plain values.

        Raises:
            ValueError: ``key`` is registered already.
        """
        self._context.state.register(key, load_state_dict, state_dict)

    def set_state_dict_fns(self, load_state_dict: Callable[[T], None], state_dict: Callable[[], T]) -> None:
        """Register the user's state under "default", in place of what was registered there.

        Args:
            load_state_dict: see ``register_state_dict_fn``.
            state_dict: see ``register_state_dict_fn``.
        """
        self._context.state.register("default", load_state_dict, state_dict, replace=True)

    def compare_only(self, keys: Collection[str]) -> None:
        """Exclude state that differs between groups by design from the comparison of their weights. It still heals.

        Args:
            keys: of the registered parts that are equal in all groups between two steps. Empty: never compare.
        """
        self._context.state.compared = frozenset(keys)

    def allow_state_dict_read(self) -> None:
        """End ``disallow_state_dict_read``."""
        self._context.state.readable = True

    def disallow_state_dict_read(self) -> None:
        """Hand out no state until ``allow_state_dict_read``, because the state is in the middle of a change."""
        self._context.state.readable = False

    def state_dict(self) -> dict[str, Any]:
        """Return the Manager's part of the user's own checkpoint.

        Returns:
            ``step``, ``batches_committed`` and, after the first commit, ``lineage``.

        Raises:
            KeepstepError: this group catches up, as ``Optimizer(catch_up=True)`` says, and its weights are not those of
                ``current_step()``. Otherwise this waits for them.
        """
        follower = self._context.follower
        if follower is not None and follower.automatic:
            follower.settle("Manager.state_dict()")
        self._refuse_while_catching_up("state_dict()")
        self._steps.check_change()
        return self._context.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the user's own checkpoint.

        Once groups that resumed have committed a step, a group that was away since before the resume heals from them,
        even when its step is higher.

        Args:
            state_dict: what ``state_dict`` returned. One of torchft, which has no lineage, works too.
        """
        self._steps.refuse_in_rehearsal("load_state_dict()")
        self._context.progress.resume(state_dict)
        self._context.log_progress("loaded")

    def save_checkpoint(self) -> LastCheckpoint:
        """Write a durable checkpoint of the last step now, in addition to those of ``durable_every``.

        Call it in all groups and ranks, between ``should_commit`` (or ``Optimizer.step``) and the next ``start_quorum``
        (``Optimizer.zero_grad``). Returns when the state is copied; the upload goes on in the background. If an
        earlier checkpoint is still being uploaded, this waits up to ``timeout``, unless ``durable_newest_wins``.

        Returns:
            ``last_checkpoint`` from before this call, with the error of the last write if it failed.

        Raises:
            RuntimeError: this process has committed no step since it started or healed.
            KeepstepError: this group catches up, as ``Optimizer(catch_up=True)`` says. Otherwise it then leaves the
                checkpoint to the other groups.
        """
        follower = self._context.follower
        if self.catching_up and follower is not None and follower.automatic:
            self._context.log.info("checkpoint left to the other groups: this one catches up", step=self.current_step())
            return self._durability.last
        self._refuse_while_catching_up("save_checkpoint()")
        self._steps.check_change()
        return self._durability.save()

    @property
    def last_checkpoint(self) -> LastCheckpoint:
        """The newest durable checkpoint that this rank knows to be committed, and the error of the last write."""
        return self._durability.last

    def resume(self) -> bool:
        """Load the newest durable checkpoint of the job now, instead of in the first ``start_quorum``.

        Call it in all ranks, after all state is registered, if the script needs ``current_step()`` before its first
        step. It does nothing if another group has a live state, from which this group heals, if this group has a
        state, and with ``resume=False``.

        Returns:
            Whether it loaded one.

        Raises:
            KeepstepError: no relay says whether the job has one, or it could not be loaded.
        """
        self._steps.refuse_in_rehearsal("resume()")
        return self._durability.resume()

    @property
    def catching_up(self) -> bool:
        """Whether this group takes part without weights, while the state of the others arrives.

        Until it is False, save, evaluate and export nothing: the weights are not those of ``current_step()``. It
        changes in ``Optimizer.step`` and in ``finish``; also when the script uses the model between two steps, unless
        it set ``Optimizer(catch_up=True)``.
        """
        follower = self._context.follower
        return self._context.progress.following or (follower is not None and follower.doubts)

    def _refuse_while_catching_up(self, call: str) -> None:
        if self._context.progress.following:
            raise KeepstepError(
                f"{call} at step {self.current_step()}: this group catches up, and its weights are older than that; "
                f"save only while manager.catching_up is False"
            )

    def mark_torn(self) -> None:
        """Mark this group's state as torn, because an optimizer failed in the middle of a step for example.

        The group heals from another one at the next step, and no group heals from it until then.
        """
        self._context.tear()

    @property
    def leaving(self) -> bool:
        """Whether this group was asked to leave, by SIGTERM or a drain: the next ``start_quorum`` raises Drained."""
        return bool(self._context.asks.leaving)

    @property
    def torn(self) -> bool:
        """Whether this group's state is torn (``mark_torn``), until it heals."""
        return self._context.progress.torn

    def record(self, **values: float) -> None:
        """Record numbers of the current step for the metrics service, such as ``record(loss=loss.item())``.

        Rank 0 sends them in the background with the step that ends next. Without a metrics service nothing is sent.

        Args:
            **values: at most 16 names.
        """
        if not self._steps.rehearsing:
            self._context.telemetry.values({name: float(value) for name, value in values.items()})

    def current_step(self) -> int:
        """Return the number of committed steps. It changes only in ``should_commit`` and when this group heals."""
        return self._context.progress.step

    def batches_committed(self) -> int:
        """Return the number of batches, of all groups, that went into committed steps."""
        return self._context.progress.batches_committed

    def replica_id(self) -> str:
        """Return the id of this incarnation of the group, ``name:uuid``."""
        return self._context.link.replica_id

    def group_rank(self) -> int:
        """Return the rank of this process in its group."""
        return self._context.settings.rank

    def group_world_size(self) -> int:
        """Return the number of ranks of this group."""
        return self._context.settings.world_size

    @property
    def services(self) -> tuple[ServiceAddress, ...]:
        """Relays and metrics services that are registered with the lighthouse now."""
        return self._context.link.services

    # ---- the end

    def finish(self, timeout: timedelta | None = None, *, publish: bool = False) -> Finished:
        """Wait until all groups have taken their last step, at the same state. No step follows.

        Call it in all groups and ranks, between two steps, after the training loop. A group that died in the last steps
        is waited for, for ``finish_grace`` of the job's policy (30 s), and heals from the others. This group heals
        too, if its state differs from theirs, whose digests are compared; so evaluate and save the model afterwards.
        Then the job is closed: a group that starts later ends with exit code 80, until ``keepstep job reopen`` allows
        it to train on. With ``publish`` such a group loads the final state from a relay instead, and finishes too.

        The training loop must end at the same step in all groups, also in one that was started again: let
        ``current_step()`` decide, not a count of the script's own.

        Args:
            timeout: None: wait as long as groups are connected. Groups that are connected and do not finish are waited
                for as in a step (``join_timeout``; without limit if they are the majority).
            publish: True: write the final state to the relays before the job is closed, as a durable checkpoint. All
                groups and ranks must pass the same value. A failed write is logged, and keeps no group from finishing.

        Returns:
            The final step, and the number of groups. The same again, if it is called again.

        Raises:
            TimeoutError: ``timeout`` is over; the message says what the groups wait for. Call it again to go on.
            KeepstepError: the lighthouse is older than this function.
            MismatchExit: other groups took their last step at another step, or pass another ``publish``; the reason
                names both.
            DivergedExit: the weights of this group differ from those of the others: again after a heal because of that,
                or no majority tells which are right.
            JobClosedExit: the others have finished without this group.
            Drained, EvictedExit: as in ``start_quorum``.
        """
        return self._finishing.finish(timeout, publish=publish)

    def leave_soon(self, reason: str, notice: timedelta | None = None) -> None:
        """Leave the job at the end of the step, as after SIGTERM: the next ``start_quorum`` raises Drained.

        For notices that come in another way than as a signal. From any thread, more than once too.

        Args:
            reason: for the log and the lighthouse.
            notice: time in which a spare may take the place of this group. Without a spare the group leaves at once.
                Default: ``KEEPSTEP_NOTICE_SEC``.
        """
        self._membership.leave_soon(reason, None if notice is None else notice.total_seconds())

    def forked(self) -> None:
        """Disable the copy of this object in a forked child: only the parent has its threads."""
        if not self._membership.ended:
            _running.remove(self)
            atexit.unregister(self._exit)
            self._membership.stop_acting()
            never_free(self._context, self._steps, self._durability)
            of_parent = cast("Any", OfParent("this Manager", self._pid))
            self._context = self._steps = self._durability = self._background = self._finishing = of_parent

    def shutdown(self, wait: bool = True) -> None:
        """Leave the job, and free threads, ports and memory. May be called more than once.

        Without ``finish``, a group that died in the last steps does not get the final state. The end of the process
        does the same.

        In the middle of a step the group does not say goodbye, so that its peers learn that it is lost; its other ranks
        end.

        Args:
            wait: wait until transfers of live state have ended, and a durable checkpoint that is due is written. It is
                not written while an error passes, such as in a ``finally`` block, that came after the last step began.
        """
        self._shut_down(wait=wait, at_exit=False)

    def _exit(self) -> None:
        self._shut_down(wait=True, at_exit=True)

    def _shut_down(self, *, wait: bool, at_exit: bool) -> None:
        if self._membership.ended:
            return
        error, attempt = script_error(self._steps.handled, at_exit=at_exit), self._steps.attempt
        _running.remove(self)
        atexit.unregister(self._exit)
        self._membership.stop_acting()
        context, limit = self._context, min(self._settings.timeout.total_seconds(), SHUTDOWN_SECONDS)
        in_step = attempt is not None and attempt.is_in_flight()
        follower = context.follower
        ends = wait and not (in_step or error or at_exit or context.asks.leaving)
        if ends and follower is not None and follower.automatic:
            follower.settle_last()
        if in_step and attempt is not None:
            attempt.refuse_joiners("this group ended in the middle of a step")
        self._membership.end(context, limit, error, in_step=in_step)
        from keepstep.lifecycle import wiring

        try:
            self._durability.close(finish=wait and not in_step and not error)
        finally:
            wiring.disconnect(context, limit, wait=wait)
