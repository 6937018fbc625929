"""One attempt at one step, from ``start_quorum`` to ``should_commit``: its quorum, its collectives, heals and vote.

What a step does is decided by ``quorum_plan``; the waits are here, and each has a deadline. What goes wrong is kept in
``error``: the step does not commit, and the training thread goes on. What ends the process is raised, and kept in
``StepContext.fatal``.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, NoReturn

from keepstep.checkpointing.errors import TransferError
from keepstep.checkpointing.transport import CheckpointTransport
from keepstep.exits import EvictedExit, GroupFailedExit
from keepstep.group import Leaving, RankLink
from keepstep.group_core import DisagreeError
from keepstep.group_link import LinkSettings
from keepstep.group_peers import checkpoint_metadata, first_layout_difference
from keepstep.live_state import LiveState
from keepstep.managed_work import ManagedWork
from keepstep.mesh_thread import SLACK, MeshThread
from keepstep.quorum_plan import QuorumPlan, make_plan
from keepstep.reconfigure import Reconfigurer
from keepstep.standing import Standing
from keepstep.step_log import StepLog
from keepstep_mesh.errors import Banned, Drained, KeepstepError, LayoutMismatch, SessionClosed
from keepstep_mesh.lineage import is_torn
from keepstep_mesh.logging import Logger
from keepstep_mesh.messages import RankAsk, RankVote


class WorldSizeMode(Enum):
    """How many groups take part in a step.

    DYNAMIC: all that are there. FIXED_WITH_SPARES: at most ``min_replica_size``; the rest contribute zeros and stand
    by.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


@dataclass(slots=True)
class StepContext:
    """What all attempts of this process work with. ``timeout``: of collectives, heals and votes."""

    mesh: MeshThread
    link: RankLink
    settings: LinkSettings
    reconfigurer: Reconfigurer
    transport: CheckpointTransport[dict[str, Any]]
    state: LiveState
    standing: Standing
    steps: StepLog
    log: Logger
    timeout: timedelta
    min_replica_size: int
    world_size_mode: WorldSizeMode
    last_plan: QuorumPlan | None = None
    fatal: BaseException | None = None
    """Why there is no further step here."""
    layout: list[str] = field(default_factory=list)

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
        self.standing.tear()
        self.steps.write("torn", 0, 0, lineage=self.standing.lineage)


class Attempt:
    """``begin`` asks for its quorum.

    Args:
        allow_heal: False: a group that is behind takes part as it is.
        all_participate: who heals does so before the forward pass, and takes part.
        timeout: of the quorum, seconds.
    """

    def __init__(self, context: StepContext, *, allow_heal: bool, all_participate: bool, timeout: float) -> None:
        self.all_participate = all_participate
        self.allow_heal = allow_heal
        self.error: Exception | None = None
        self.works: list[ManagedWork] = []
        self.plan: QuorumPlan | None = None
        """From when the training thread has waited for the quorum and its process group."""
        self.answered: QuorumPlan | None = None
        """From when the quorum is there."""
        self.done = False
        self._context = context
        self.timeout = timeout
        self._number = 0
        """Of the group's attempts, as its rank 0 counts them."""
        self._staged = False
        self._heal_tried = False
        self._healed = False
        self._ready: concurrent.futures.Future[QuorumPlan] | None = None

    # ---- the quorum

    def begin(self, ask: RankAsk) -> None:
        self._ready = self._context.mesh.spawn(self._get_ready(ask))

    async def _get_ready(self, ask: RankAsk) -> QuorumPlan:
        context = self._context
        answer = await context.link.ask(ask)
        self.answered = plan = make_plan(answer.quorum, context.link.replica_id, context.last_plan)
        context.last_plan = plan
        self._number = answer.attempt
        context.transport.disallow_checkpoint()  # whoever read the state of the step before is done or too late
        if plan.heal and self.allow_heal:
            context.link.healing(0, 0, 0.0)
        try:
            built = await context.reconfigurer.follow(plan)
            context.steps.quorum(context.standing.step, plan, built=built)
        except Exception as error:  # noqa: BLE001  a process group that cannot be built is a failed step, whatever it says
            self.report(error)
        return plan

    def wait_plan(self) -> QuorumPlan:
        """The plan of this step. Raises what kept the quorum from forming."""
        if self.plan is None:
            context = self._context
            if self._ready is None:
                raise RuntimeError("this step's quorum was never asked for")
            limit = self.timeout * (1 + context.settings.quorum_retries) + context.timeout.total_seconds() + SLACK
            try:
                self.plan = self._ready.result(limit)
            except Leaving as error:
                context.end_for(Drained(str(error)))
            except DisagreeError as error:
                context.fail_group(str(error))
                context.end_for(GroupFailedExit(str(error)))
            except LayoutMismatch as error:
                difference = context.mesh.call(
                    first_layout_difference(error.peer_address, context.settings.token, context.layout), SLACK
                )
                context.end_for(LayoutMismatch(f"{error}. {difference}", error.peer_address))
            except Banned as error:
                context.end_for(EvictedExit(str(error)))
            except SessionClosed:
                context.raise_fatal()
                raise
        return self.plan

    def counted_on(self) -> bool:
        """Whether peers may count on our part in it. A request that is not answered yet is withdrawn."""
        if not self.done and self.answered is None and self._ready is not None:
            self._ready.cancel()
        return not self.done and self.answered is not None

    def participation(self, plan: QuorumPlan) -> tuple[int | None, int]:
        """This group's place among those that take part (None: it does not), and how many they are."""
        rank: int | None
        if self.all_participate:
            rank, world = plan.replica_rank, plan.replica_world_size
        else:
            rank, world = plan.max_replica_rank, plan.max_world_size
        if self._context.world_size_mode is WorldSizeMode.FIXED_WITH_SPARES:
            world = min(world, self._context.min_replica_size)
            if rank is not None and rank >= world:
                rank = None
        return rank, world

    def report(self, error: Exception) -> None:
        """What goes wrong late with one step is not held against the next."""
        context = self._context
        if not self.done and self.error is None:
            self.error = error
            reason = f"{type(error).__name__}: {error}"
            context.log.warning("step will not commit", step=context.standing.step, reason=reason)
            context.reconfigurer.abort(f"this group reported {reason}")

    # ---- live state

    def exchange_state(self, plan: QuorumPlan) -> None:
        """Hands out live state to those who heal from this group, takes it in when this group heals."""
        context = self._context
        if plan.destinations and not self._staged:
            self._staged = True
            try:
                context.state.stage(context.transport, list(plan.destinations), plan.max_step, context.timeout)
            except Exception as error:  # noqa: BLE001  whatever it is, it is the joiner that goes without
                reason = f"{type(error).__name__}: {error}"
                context.log.error("nobody can heal from this group", step=context.standing.step, reason=reason)
        if plan.source is not None and not self._heal_tried:
            self._heal_tried = True
            try:
                self._heal(plan, plan.source)
                self._healed = True
            except Exception as error:  # noqa: BLE001  whatever broke it, this step does not commit here
                self.report(error)
        if not plan.heal and (context.standing.torn or is_torn(plan.lineage)):  # so is a group of which one rank is
            context.end_for(
                KeepstepError(
                    "a broken heal left this group's state half written and no healthy group is there to heal from; "
                    "restart it from its last checkpoint"
                )
            )

    def _heal(self, plan: QuorumPlan, source: int) -> None:
        """Takes over the state of ``source`` as it was at ``max_step``."""
        context, standing = self._context, self._context.standing
        started, seconds = time.monotonic(), context.timeout.total_seconds()
        member, settings = plan.members[source], context.settings
        asked = checkpoint_metadata(member.info.address, settings.rank, settings.token, seconds)
        metadata = context.mesh.call(asked, seconds + SLACK)

        def progress(done: int, total: int, rate: float) -> None:
            context.mesh.loop.call_soon_threadsafe(context.link.healing, done, total, rate)

        try:
            received = context.state.receive(
                context.transport, source, metadata, plan.max_step, context.timeout, progress
            )
            if standing.step != plan.max_step:
                raise KeepstepError(f"{member.replica_id} sent step {standing.step} instead of step {plan.max_step}")
        except BaseException as error:
            if not isinstance(error, TransferError) or error.torn:
                context.tear()
            raise
        standing.lineage = plan.lineage
        took = time.monotonic() - started
        context.log.info("healed", step=standing.step, source=member.replica_id, bytes=received, seconds=round(took, 3))
        context.steps.write(
            *("healed", standing.step, plan.quorum_id),
            epoch=plan.epoch,
            lineage=plan.lineage,
            seconds=took,
            bytes=received,
            source=member.replica_id,
        )

    # ---- the end

    def finish_works(self) -> None:
        """Waits for the collectives."""
        for work in self.works:
            if work.wait() and work.after is not None:
                try:
                    work.after()
                except Exception as error:  # noqa: BLE001  what it leaves behind is equal nowhere else
                    self.report(error)

    def vote(self, plan: QuorumPlan, limit: timedelta) -> bool:
        """The group's decision. GroupFailedExit when it cannot be known."""
        context = self._context
        participants = self.participation(plan)[1]
        if self.error is None and participants < context.min_replica_size:
            self.error = KeepstepError(
                f"{participants} groups take part, min_replica_size is {context.min_replica_size}"
            )
            context.log.warning("step will not commit", step=context.standing.step, reason=str(self.error))
        ok = self.error is None
        if context.settings.world_size == 1:
            return ok
        vote = RankVote(plan.epoch, plan.quorum_id, plan.max_step, self._number, ok)
        # others may wait for a collective and a heal (its address, its bytes) first; a death is noticed at once
        seconds = limit.total_seconds() + 3 * context.timeout.total_seconds()
        try:
            return context.mesh.call(context.link.vote(vote, seconds), seconds + SLACK)
        except (TimeoutError, KeepstepError, OSError) as error:
            reason = f"the commit decision of step {plan.max_step} cannot be known: {type(error).__name__}: {error}"
            context.fail_group(reason)
            raise GroupFailedExit(reason) from error

    def settle(self, plan: QuorumPlan | None, *, committed: bool) -> None:
        """What became of the step is what the group stands at."""
        context, standing = self._context, self._context.standing
        self._is_over()
        if committed and plan is not None:
            participants = self.participation(plan)[1]
            facts = {"epoch": plan.epoch, "participants": participants, "lineage": standing.lineage}
            behind = plan.heal and not self._healed
            if behind:
                facts["behind"] = True
            standing.commit(plan, participants, behind=behind)
            context.steps.write("committed", standing.step, plan.quorum_id, **facts)
            return
        standing.discard()
        epoch, quorum_id = (plan.epoch, plan.quorum_id) if plan else (0, 0)
        context.steps.write("discarded", standing.step, quorum_id, epoch=epoch, reason=str(self.error))

    def abandon(self) -> None:
        """A step that never came to ``should_commit`` (found_inf, an exception): nothing of it may reach the next.

        Peers that still wait for our part in it learn that it will not come.
        """
        with contextlib.suppress(Exception):  # it was not committed, so nobody asks why
            if self.wait_plan().replica_world_size > 1:
                self._context.reconfigurer.abort("this group abandoned the step")
        for work in self.works:
            work.wait()
        self._is_over()

    def _is_over(self) -> None:
        self.done = True
        self._context.link.finished_step()
