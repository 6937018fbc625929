"""One attempt at one step, from ``start_quorum`` to ``should_commit``: its quorum, its collectives, heals and vote.

What a step does is decided by ``quorum_plan``; the waits are here, and each has a deadline. What goes wrong is kept in
``error``: the step does not commit, and the training thread goes on. What ends the process is raised, and kept in
``StepContext.fatal``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from keepstep.checkpointing.errors import TransferError, TransferTimeout
from keepstep.checkpointing.transport import CheckpointTransport, Exchange
from keepstep.group.group_link import LinkSettings
from keepstep.group.group_peers import checkpoint_metadata, first_layout_difference
from keepstep.group.merging import DisagreeError
from keepstep.group.quorum_plan import QuorumPlan, WorldSizeMode, make_plan
from keepstep.group.rank_link import Leaving, RankLink
from keepstep.runtime.exits import EvictedExit, GroupFailedExit
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.step.heal_meter import REPORT_SECONDS, HealMeter, log_fields
from keepstep.step.live_state import LiveState
from keepstep.step.managed_work import ManagedWork
from keepstep.step.progress import GroupProgress
from keepstep.step.reconfigurer import Reconfigurer
from keepstep.step.step_log import StepLog
from keepstep.step.step_telemetry import StepTelemetry, StepTimes
from keepstep_mesh.config.logging import Logger
from keepstep_mesh.errors import Banned, Drained, KeepstepError, LayoutMismatch, SessionClosed
from keepstep_mesh.protocol.group_messages import RankAsk, RankVote
from keepstep_mesh.protocol.lineage import is_diverged
from keepstep_mesh.protocol.membership import Lineage, StateRoot
from keepstep_mesh.protocol.messages import Healing

MAX_HEAL_ROUNDS = 5
"""Quorums in a row in which groups heal before the step, after which the step fails: it has to be seen."""
MAX_HEAL_DOUBLINGS = 10
"""As at the lighthouse."""
GIVE_UP_SECONDS = 1.0
"""A heal goes on for so much longer than the lighthouse waits for it: which then knows that it is late, not broken."""
SEEN_TO_WAIT_SECONDS = 0.5
"""A longer wait for the quorum is told before it ends."""
TORN_FOR_GOOD = (
    "a broken heal, or optimizer step, left this group's state half written and this step does not mend it: no healthy "
    "group is there to heal from, or healing is not allowed. Restart the group from its last checkpoint"
)


@dataclass(slots=True)
class StepContext:
    """What all attempts of this process work with. ``timeout``: of collectives, heals and votes."""

    mesh: LoopThread
    link: RankLink
    settings: LinkSettings
    reconfigurer: Reconfigurer
    transport: CheckpointTransport[dict[str, Any]]
    state: LiveState
    progress: GroupProgress
    steps: StepLog
    telemetry: StepTelemetry
    log: Logger
    timeout: timedelta
    min_replica_size: int
    world_size_mode: WorldSizeMode
    last_plan: QuorumPlan | None = None
    fatal: BaseException | None = None
    """Why there is no further step here."""
    job_settings: str = ""
    """What decides this group's arithmetic; the other groups must have the same."""
    layout: list[str] = field(default_factory=list)
    root: StateRoot | None = None
    """What the lighthouse wants to compare, until it has it."""
    leaving: str = ""
    """Why this group is to leave, once it is."""
    late_heals: int = 0
    """Heals in a row that ran out of time: the next may take twice as long."""

    def end_for(self, error: BaseException) -> NoReturn:
        self.fatal = error
        raise error

    def raise_fatal(self) -> None:
        if self.fatal is not None:
            raise self.fatal

    def fail_group(self, reason: str) -> None:
        """Says to the group's other ranks that it ends."""
        with contextlib.suppress(TimeoutError, KeepstepError, OSError):
            self.mesh.call(self.link.fail(reason), 1.0)

    def tear(self) -> None:
        """The state is of no step any more: this group heals from another, and nobody from it."""
        self.progress.tear()
        self.steps.write("torn", 0, 0, lineage=self.progress.lineage)

    def diverge(self) -> None:
        """This group's weights were found to be others than the cohort's: nobody heals from it until it has healed."""
        self.log.error("weights differ from those of the other groups", step=self.progress.step)
        self.progress.diverge()
        self.steps.write("diverged", self.progress.step, 0, lineage=self.progress.lineage)


class Attempt:
    """``begin`` asks for its quorum.

    Args:
        allow_heal: False: a group that is behind takes part as it is. So it does when any member asked so: from the
            answer on ``allow_heal`` is that of the round.
        sync: who heals does so before the forward pass, and takes part. The step begins with the quorum after that.
        first_step: the same, if no group has committed a step.
        timeout: of the quorum, seconds.
        arguments: what it was started with, for whoever wants to continue it.
    """

    def __init__(
        self,
        context: StepContext,
        *,
        allow_heal: bool,
        sync: bool,
        first_step: bool,
        timeout: float,
        arguments: tuple[object, ...] = (),
    ) -> None:
        self.arguments = arguments
        self.allow_heal = allow_heal
        self.error: Exception | None = None
        self._works: list[ManagedWork] = []
        self.plan: QuorumPlan | None = None
        """From when the training thread has waited for the quorum and its process group."""
        self.answered: QuorumPlan | None = None
        """From when the quorum is there."""
        self.done = False
        self._context = context
        self._sync = sync
        self._first_step = first_step
        self._healed_before = sync
        """Known with the answer: nobody's part depends on a heal that comes later."""
        self.timeout = timeout
        self._times = StepTimes(time.monotonic())
        self._number = 0
        """Of the group's attempts, as its rank 0 counts them."""
        self._staged = False
        self._heal_tried = False
        self._healed = False
        self.synchronized = False
        """What this step commits is equal in all groups that took part; the script says so."""
        self._heal_timeout: float | None = None
        """Seconds that the next quorum waits for a heal; None: not known."""
        self._ready: concurrent.futures.Future[QuorumPlan] | None = None
        self._began_at: tuple[int, Lineage] | None = None
        """Step and lineage of this group when ``begin`` returned."""

    # ---- the quorum

    def begin(self, ask: RankAsk) -> None:
        """Asks; waits, and heals, where that comes before the forward pass. Call it again after ``quorum_failed``."""
        self._ready = self._context.mesh.spawn(self._get_ready(ask))
        self._heal_before_step(ask)
        self._began_at = (self._context.progress.step, self._context.progress.lineage)

    def _heal_before_step(self, ask: RankAsk) -> None:
        """In a synchronous or first step: exchanges live state, and asks again, until no member of the quorum heals."""
        failed: list[Exception] = []
        for tried in range(MAX_HEAL_ROUNDS if self._sync or self._first_step else 0):
            plan = self.wait_plan()
            if not (self._healed_before and self.allow_heal and plan.healing):
                return
            if (error := self._exchange_state(plan)) is not None:
                self._context.log.warning("heal failed", step=plan.max_step, tried=tried + 1, reason=str(error))
                failed.append(error)
            if tried + 1 < MAX_HEAL_ROUNDS:
                self._ask_again(ask, len(failed))
            else:
                others = KeepstepError(f"in {MAX_HEAL_ROUNDS} quorums in a row a group had to heal before the step")
                self.error = None
                self.report(failed[-1] if failed else others)

    def _ask_again(self, ask: RankAsk, failed_heals: int) -> None:
        """For the same step, after live state was exchanged. The lighthouse waits for those that still heal, up to
        ``heal_timeout``; a collective would wait for them up to its own timeout. Whether to ask again follows from the
        quorum, so all groups, and all ranks of a group, do.
        """
        context, progress = self._context, self._context.progress
        self.timeout = ask.timeout_ms / 1000 + (self._heal_limit() or 0.0)
        again = replace(
            ask,
            step=progress.step,
            lineage=progress.lineage,
            batches_committed=progress.batches_committed,
            commit_failures=max(failed_heals, 1 if context.reconfigurer.broken else 0),
            timeout_ms=round(self.timeout * 1000),
            root=None,
            leaving=context.leaving,
        )
        self.error = self.plan = self.answered = None
        self._staged = self._heal_tried = self._healed = False
        self._ready = context.mesh.spawn(self._get_ready(again))

    @property
    def quorum_failed(self) -> bool:
        """The request has ended, and brought no quorum."""
        ready = self._ready
        return ready is not None and ready.done() and (ready.cancelled() or ready.exception() is not None)

    def is_untouched(self) -> bool:
        """Whether another ``start_quorum`` may continue it: the quorum is pending, or is there and all its members are,
        nothing was reduced or went wrong, and the group is at the state that it asked with, or healed to.
        """
        context = self._context
        if self.done or self.error is not None or self._works or self._ready is None or self.quorum_failed:
            return False
        if self.synchronized:
            return False
        if (context.progress.step, context.progress.lineage) != self._began_at:
            return False
        return not (self._ready.done() and context.reconfigurer.broken)

    async def _get_ready(self, ask: RankAsk) -> QuorumPlan:
        context = self._context
        answer = await context.link.ask(ask)
        self.answered = plan = make_plan(answer.quorum, context.link.replica_id, context.last_plan)
        context.last_plan, context.root = plan, None
        self._number = answer.attempt
        self.allow_heal = self.allow_heal and plan.allow_heal
        self._healed_before = self._sync or not self.allow_heal or (self._first_step and plan.first_step)
        self._heal_timeout = answer.heal_timeout_ms / 1000 or None
        context.transport.disallow_checkpoint()  # whoever read the state of the step before is done or too late
        if plan.heal and self.allow_heal:
            source = "" if plan.source is None else plan.members[plan.source].replica_id
            context.link.healing(Healing(0, 0, 0.0, plan.max_step, source))
        try:
            built = await context.reconfigurer.follow(plan)
            context.steps.quorum(context.progress.step, plan, built=built)
        except Exception as error:  # noqa: BLE001  a process group that cannot be built is a failed step, whatever it says
            self.report(error)
        return plan

    def wait_plan(self) -> QuorumPlan:
        """The plan of this step. Raises what kept the quorum from forming."""
        if self.plan is None:
            context = self._context
            if self._ready is None:
                raise RuntimeError("this step's quorum was never asked for")
            asking = 2 * self.timeout * (1 + context.settings.quorum_retries)  # the group's ranks wait, then the group
            limit = asking + context.timeout.total_seconds() + CALL_MARGIN_SECONDS
            try:
                self.plan = self._wait_ready(self._ready, limit)
            except Leaving as error:
                context.end_for(Drained(str(error)))
            except DisagreeError as error:
                context.fail_group(str(error))
                context.end_for(GroupFailedExit(str(error)))
            except LayoutMismatch as error:
                if not error.peer_address:
                    context.end_for(error)
                difference = context.mesh.call(
                    first_layout_difference(
                        error.peer_address, context.settings.token, context.layout, settings=context.job_settings
                    ),
                    CALL_MARGIN_SECONDS,
                )
                context.end_for(LayoutMismatch(f"{error}. {difference}", error.peer_address))
            except Banned as error:
                context.end_for(EvictedExit(str(error)))
            except SessionClosed:
                context.raise_fatal()
                raise
            if self.plan.diverged and not is_diverged(context.progress.lineage):
                context.diverge()
        torn = self._context.progress.torn or self.plan.torn  # so is a group of which one rank is, or healed alone
        if torn and not (self.plan.heal and self.allow_heal):
            self._context.end_for(KeepstepError(TORN_FOR_GOOD))
        return self.plan

    def _wait_ready(self, ready: concurrent.futures.Future[QuorumPlan], limit: float) -> QuorumPlan:
        if ready.done():
            return ready.result()
        began = time.monotonic()
        try:
            return ready.result(SEEN_TO_WAIT_SECONDS)
        except TimeoutError:
            if not ready.done():
                self._context.telemetry.state("waiting_quorum")
            return ready.result(limit)
        finally:
            self._times.quorum_seconds += time.monotonic() - began

    def is_in_flight(self) -> bool:
        """Whether peers may count on our part in it. A request that is not answered yet is withdrawn."""
        if not self.done and self.answered is None and self._ready is not None:
            self._ready.cancel()
        return not self.done and self.answered is not None

    def participation(self, plan: QuorumPlan) -> tuple[int | None, int]:
        """See ``QuorumPlan.participation``."""
        context = self._context
        return plan.participation(context.world_size_mode, context.min_replica_size, healed_before=self._healed_before)

    def report(self, error: Exception) -> None:
        """What goes wrong late with one step is not held against the next."""
        context = self._context
        if not self.done and self.error is None:
            self.error = error
            reason = f"{type(error).__name__}: {error}"
            context.log.warning("step will not commit", step=context.progress.step, reason=reason)
            context.reconfigurer.abort(f"this group reported {reason}")

    # ---- collectives

    def allreduce(
        self, tensor: torch.Tensor, reduce_op: ReduceOp | ReduceOp.RedOpType, *, average: bool
    ) -> ManagedWork:
        """Reduces ``tensor`` in place over the groups that take part. Errors are reported, not raised.

        The arithmetic has a version, ``agreement.ARITHMETIC``. float16 is divided before the sum, which would overflow,
        as in torch's DDP; other floats are divided after it. A sum of booleans is a logical or, as with NCCL.
        """
        context = self._context
        try:
            plan = self.wait_plan() if self.error is None else None
            if plan is None or self.error is not None:
                return ManagedWork(None, tensor, ok=False)
            rank, world = self.participation(plan)
            if rank is None:
                if reduce_op not in (ReduceOp.AVG, ReduceOp.SUM):
                    raise ValueError(f"{reduce_op} has no neutral contribution for a group that does not take part")
                tensor.zero_()
            whole = tensor.contiguous()  # a process group takes what lies behind the first element
            scale = 1 / world if average and world > 1 else None  # as torch's DDP: three times as fast as a division
            if scale is not None and whole.dtype is torch.float16:
                whole.mul_(scale)
                scale = None
            options = dist.AllreduceOptions()
            wired = ReduceOp.SUM if average else reduce_op
            if whole.dtype is torch.bool and wired == ReduceOp.SUM:
                wired = ReduceOp.MAX  # a backend adds bytes: two Trues would be no boolean, 256 of them False
            options.reduceOp = wired  # type: ignore[assignment]
            options.timeout = context.timeout
            self._times.launched = time.monotonic()
            work = context.reconfigurer.pg.allreduce([whole], options)
        except SystemExit as error:  # should_commit raises it: nothing may fly through the middle of a backward pass
            self.report(KeepstepError(f"leaving: {error}"))
            return ManagedWork(None, tensor, ok=False)
        except Exception as error:  # noqa: BLE001  reported: the step does not commit, training goes on
            self.report(error)
            return ManagedWork(None, tensor, ok=False)

        def finish() -> None:
            if scale is not None:
                whole.mul_(scale)
            if whole is not tensor:
                tensor.copy_(whole)

        managed = ManagedWork(work, tensor, finish, self.report)
        self._works.append(managed)
        return managed

    def _finish_works(self) -> None:
        """Waits for the collectives, and for the device."""
        context = self._context
        for work in self._works:
            if work.wait() and work.after is not None:
                try:
                    work.after()
                except Exception as error:  # noqa: BLE001  what it leaves behind is equal nowhere else
                    self.report(error)
        pg = context.reconfigurer.pg
        if self._works and self.error is None and not getattr(pg, "works_tell_all", False):
            broken: Exception | None = pg.errored()  # type: ignore[attr-defined]
            if broken is not None:
                self.report(broken)
        if context.reconfigurer.device is not None:
            torch.cuda.current_stream().synchronize()

    # ---- live state

    def _exchange_state(self, plan: QuorumPlan) -> Exception | None:
        """Hands out live state to those who heal from this group, takes it in when this group heals: what broke it."""
        if not self.allow_heal or not plan.healing:
            return None
        transport = self._context.transport
        transport.prepare(self._exchange(plan))
        if (plan.destinations or (transport.needs_all_sources and not plan.heal)) and not self._staged:
            self._staged = True
            self._hand_out(plan, list(plan.destinations))
        if plan.source is not None and not self._heal_tried:
            self._heal_tried = True
            began = time.monotonic()
            try:
                with self._measured(plan, plan.source) as meter:
                    self._heal(plan, plan.source, meter)
                self._healed = True
            except Exception as error:  # noqa: BLE001  whatever broke it, this step does not commit here
                return error
            finally:
                self._times.heal_seconds += time.monotonic() - began
        return None

    def _exchange(self, plan: QuorumPlan) -> Exchange:
        """Who has and who needs what, for the transport."""
        settings, ids = self._context.settings, plan.replica_ids
        return Exchange(
            job=settings.job,
            epoch=plan.epoch,
            quorum_id=plan.quorum_id,
            step=plan.max_step,
            replica_id=ids[plan.replica_rank],
            rank=settings.rank,
            world_size=settings.world_size,
            sources=tuple(ids[rank] for rank in plan.cohort),
            joiners=tuple(ids[rank] for rank in plan.healing),
            beside=tuple(ids[rank] for rank in plan.beside),
            together=self._healed_before,
        )

    def _hand_out(self, plan: QuorumPlan, destinations: list[int]) -> None:
        context = self._context
        try:
            context.state.stage(context.transport, destinations, plan.max_step, context.timeout)
        except Exception as error:  # noqa: BLE001  whatever it is, it is the joiner that goes without
            reason = f"{type(error).__name__}: {error}"
            context.log.error("nobody can heal from this group", step=context.progress.step, reason=reason)
            self._refuse(plan, reason)

    def _refuse(self, plan: QuorumPlan, reason: str) -> None:
        """Who heals from this group learns at once that its state does not come."""
        context = self._context
        try:
            told = f"{context.link.replica_id}: {reason}"
            context.transport.refuse_checkpoint(list(plan.destinations), plan.max_step, told)
        except Exception as untold:  # noqa: BLE001  the joiner waits for its own deadline, then
            context.log.warning("a joiner was not told", reason=f"{type(untold).__name__}: {untold}")

    def refuse_joiners(self, reason: str) -> None:
        """This group will not come to hand out its state in this step."""
        plan = self.answered
        if plan is not None and plan.destinations and self.allow_heal and not self._staged:
            self._staged = True
            self._refuse(plan, reason)

    @contextlib.contextmanager
    def _measured(self, plan: QuorumPlan, source: int) -> Iterator[HealMeter]:
        """Around a heal: tells the lighthouse, and of a long one the log, how far it is and how it ended."""
        context = self._context
        meter = HealMeter(plan.max_step, plan.members[source].replica_id, time.monotonic())
        telling, error = context.mesh.spawn(self._tell(meter)), ""
        try:
            yield meter
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            if not telling.cancel():
                context.log.error("the progress of a heal was not told", exc_info=telling.exception())
            last = meter.last_report(self._via, error, time.monotonic())
            context.mesh.loop.call_soon_threadsafe(context.link.healing, last)

    async def _tell(self, meter: HealMeter) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            told = meter.report(self._via, time.monotonic())
            self._context.link.healing(told)
            if (event := meter.line(told)) is not None:
                self._context.log.info(event, **log_fields(told))

    @property
    def _via(self) -> str:
        return getattr(self._context.transport, "via", "")

    def _heal(self, plan: QuorumPlan, source: int, meter: HealMeter) -> None:
        """Takes over the state of ``source`` as it was at ``max_step``."""
        context, progress = self._context, self._context.progress
        started, seconds = time.monotonic(), context.timeout.total_seconds()
        member, settings = plan.members[source], context.settings
        if progress.step > plan.max_step:
            given_up = {"step": progress.step, "lineage": progress.lineage}
            context.log.warning("goes back", to_step=plan.max_step, to_lineage=plan.lineage, **given_up)
        asked = checkpoint_metadata(member.info.address, settings.rank, settings.token, seconds)
        try:
            metadata = context.mesh.call(asked, seconds + CALL_MARGIN_SECONDS)
        except (KeepstepError, TimeoutError) as error:
            raise KeepstepError(f"{member.replica_id}: {error}") from error

        try:
            self._receive(plan, source, metadata, meter)
            if progress.step != plan.max_step:
                raise KeepstepError(f"{member.replica_id} sent step {progress.step} instead of step {plan.max_step}")
        except BaseException as error:
            if not isinstance(error, TransferError) or error.torn:
                context.tear()
            raise
        progress.lineage = plan.lineage
        took, received = time.monotonic() - started, meter.bytes_done
        facts = {"source": member.replica_id, "via": self._via, "bytes": received, "seconds": round(took, 3)}
        context.log.info("healed", step=progress.step, **facts)
        context.steps.write(
            *("healed", progress.step, plan.quorum_id),
            epoch=plan.epoch,
            lineage=plan.lineage,
            seconds=took,
            bytes=received,
            source=member.replica_id,
        )

    def _receive(self, plan: QuorumPlan, source: int, metadata: str, meter: HealMeter) -> None:
        context, limit = self._context, self._heal_limit()
        longest = None if limit is None else timedelta(seconds=limit)
        try:
            context.state.receive(
                context.transport, source, metadata, plan.max_step, context.timeout, meter.moved, longest
            )
        except TransferTimeout:
            context.late_heals += 1
            raise
        context.late_heals = 0

    def _heal_limit(self) -> float | None:
        """Seconds that a heal may take."""
        if self._heal_timeout is None:
            return None
        return self._heal_timeout * 2.0 ** min(self._context.late_heals, MAX_HEAL_DOUBLINGS) + GIVE_UP_SECONDS

    def _take_root(self, plan: QuorumPlan) -> None:
        """The root digest of the reference state, where this group holds it and the lighthouse wants to compare it."""
        if not plan.verify or plan.heal:
            return
        context = self._context
        try:
            digest = context.state.root().hex()  # by every rank, whatever went wrong: FSDP's state_dict is collective
        except Exception as error:  # noqa: BLE001  whatever it is, the step is as good as before
            reason = f"{type(error).__name__}: {error}"
            context.log.error("this group cannot be compared with others", step=plan.max_step, reason=reason)
            return
        if self.error is None:  # else BatchNorm's buffers may be averaged in some groups and not in others
            context.root = StateRoot(plan.max_step, plan.lineage, digest)

    # ---- the end

    def conclude(self, limit: timedelta) -> bool:
        """Waits for what is in flight, exchanges live state, votes. ``limit``: what the vote may take."""
        plan: QuorumPlan | None = None
        try:
            plan = self.wait_plan()
        except (LayoutMismatch, SessionClosed):
            raise
        except Exception as error:  # noqa: BLE001  reported, unless it ends the process
            self._context.raise_fatal()
            self.report(error)  # no quorum: every rank of the group learns the same
        committed = False
        if plan is not None:
            self._finish_works()
            if (unhealed := self._exchange_state(plan)) is not None:
                self.report(unhealed)
            self._take_root(plan)
            committed = self._vote(plan, limit)
        self._settle(plan, committed=committed)
        return committed

    def abandon(self) -> None:
        """A step that never came to ``should_commit`` (an exception, say): nothing of it may reach the next.

        Peers, and the group's other ranks, that wait for our part in it learn that it will not come.
        """
        plan = None
        try:
            plan = self.wait_plan()
        except Exception as error:  # noqa: BLE001  reported, unless it ends the process
            self._context.raise_fatal()
            self.report(error)  # then nobody waits for us
        reason = "this group began another step instead of ending this one with should_commit()"
        self.report(KeepstepError(reason))
        self.refuse_joiners(reason)
        for work in self._works:
            work.wait()
        if plan is not None:
            self._vote(plan, self._context.timeout)
        self._settle(plan, committed=False)

    def _vote(self, plan: QuorumPlan, limit: timedelta) -> bool:
        """The group's decision. GroupFailedExit when it cannot be known."""
        context = self._context
        participants = self.participation(plan)[1]
        if self.error is None and participants < context.min_replica_size:
            self.error = KeepstepError(
                f"{participants} groups take part, min_replica_size is {context.min_replica_size}"
            )
            context.log.warning("step will not commit", step=context.progress.step, reason=str(self.error))
        ok = self.error is None
        if context.settings.world_size == 1:
            return ok
        vote = RankVote(plan.epoch, plan.quorum_id, plan.max_step, self._number, ok)
        # others may wait for a collective and a heal (its address, its bytes) first; a death is noticed at once
        seconds = limit.total_seconds() + 3 * context.timeout.total_seconds()
        seconds += (self._heal_limit() or 0.0) if plan.heal else 0.0
        try:
            committed = context.mesh.call(context.link.vote(vote, seconds), seconds + CALL_MARGIN_SECONDS)
        except (TimeoutError, KeepstepError, OSError) as error:
            reason = f"the commit decision of step {plan.max_step} cannot be known: {type(error).__name__}: {error}"
            context.fail_group(reason)
            raise GroupFailedExit(reason) from error
        if ok and not committed:
            self.error = KeepstepError("another rank of this group voted no")
        return committed

    def _settle(self, plan: QuorumPlan | None, *, committed: bool) -> None:
        """What became of the step is what the group stands at."""
        context, progress = self._context, self._context.progress
        self.done = True
        context.link.finished_step()
        if committed and plan is not None:
            participants = self.participation(plan)[1]
            facts = {"epoch": plan.epoch, "participants": participants, "lineage": progress.lineage}
            behind = plan.heal and not self._healed
            if behind:
                facts["behind"] = True
            if self.synchronized:
                facts["synchronized"] = True
                batches = (plan.reference_batches if behind else 0) or progress.batches_committed
                progress.commit_synchronized(plan.max_step, plan.lineage, batches, plan.quorum_id, participants)
            else:
                progress.commit(plan.quorum_id, participants, behind=behind)
            if progress.lineage != plan.quorum_id:
                facts["new_lineage"] = progress.lineage
            context.steps.write("committed", progress.step, plan.quorum_id, **facts)
            context.telemetry.step(self._times, progress.step, plan.quorum_id, participants, committed=True)
            return
        progress.discard()
        epoch, quorum_id = (plan.epoch, plan.quorum_id) if plan else (0, 0)
        reason = str(self.error)
        context.steps.write("discarded", progress.step, quorum_id, epoch=epoch, reason=reason)
        context.telemetry.step(self._times, progress.step, quorum_id, 0, committed=False, reason=reason[:500])
