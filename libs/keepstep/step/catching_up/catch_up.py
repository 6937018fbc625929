"""Catch up with the other groups: follow their steps without weights, then replay them on the state that arrived.

The course of a join, on the training thread:

    begin      the step in which the group would heal commits: the transfer of its state begins
    advance    after each commit: keep the averaged gradients; once the state is here, load it and replay steps
    give_up    a step was missed, or the transfer failed: the group heals from the next quorum on

``gradient_log`` decides; ``background_receive`` has the transfer. A group that uses more memory than allowed waits for
the rest of the state, and the others wait for it, as for any group that heals.

If the script did not ask for it (*automatic*), keepstep does not know that a replay gives the weights of the others. So
the group takes over the values of their optimizers, and at the end it heals: only what differs is sent. A script that
reads the weights between two steps first waits for them.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.state.values.sharding import is_dtensor
from keepstep.state.values.tensors_in_containers import tensors_in
from keepstep.step.catching_up import join_choice
from keepstep.step.catching_up.background_receive import LIMIT, BackgroundReceive
from keepstep.step.catching_up.gradient_log import FollowedStep, GradientLog, HeldState, Phase
from keepstep.step.catching_up.own_choice import OwnChoice, WeightReads
from keepstep.step.catching_up.told_values import Gradients, Taken, ToldValues, write_told
from keepstep.step.catching_up.written_values import WrittenValues
from keepstep.step.context import StepContext
from keepstep.step.reporting.heal_meter import REPORT_SECONDS, HealMeter
from keepstep.transfer.exchange import Exchange
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.lineage import followed
from keepstep_mesh.protocol.membership import Lineage
from keepstep_mesh.protocol.policy import heal_limit

MAX_FAILURES = 3
"""Catch-ups in a row that may fail; after them the group heals, and the others wait for it."""
MIN_REPLAYED = 2
"""Steps replayed after each step at least, so that fewer and fewer are left."""
REPLAY_SHARE = 0.5
"""Share of the time of a step in which more steps are replayed. The other groups wait for this time."""
RANK_WAIT_SECONDS = 5.0
"""A rank that waits for its state tells the other ranks of its group so often, and they wait so long for it each time,
beside the time of a poll."""
ASK_EVERY = 8
"""Steps between two questions for the values of the others, which keep those of ``REMEMBERED_STEPS``."""
LEAST_MEMORY = 256 * 1024 * 1024
"""Default limit of the kept gradients of small models, and while the size of the state is unknown; bytes."""


class CatchUp:
    """The catch-up of one rank. Implements ``Follower``.

    Args:
        context: of this process.
        optimizer: steps with the averaged gradients.
        memory: limit of the kept gradients in bytes. None: the size of the state, ``LEAST_MEMORY`` at least.
        automatic: whether the script did not ask for it. See the top.
        may_read: with ``automatic``: returns whether the script may read the weights now, because no step is open.
    """

    def __init__(
        self,
        context: StepContext,
        optimizer: Optimizer,
        memory: int | None,
        *,
        automatic: bool = False,
        may_read: Callable[[], bool] = lambda: False,
    ) -> None:
        self.automatic = automatic
        self._context = context
        self._optimizer = optimizer
        self._take: Callable[[], None] = lambda: None
        """Takes a step of the others."""
        self._memory = memory
        self._log: GradientLog[Taken] = GradientLog(memory or LEAST_MEMORY)
        self._values = WrittenValues(optimizer)
        self._told = ToldValues(context)
        self._may_read = may_read
        self._reads = WeightReads(self._on_read)
        self._thread = 0
        """Identifier of the thread that trains."""
        self._busy = False
        """Whether this object works on the state, so that no read is one of the script."""
        self._doubted: Lineage | None = None
        """Lineage of weights that a replay gave, and that were not compared with those of the others."""
        self._choice = OwnChoice(context.state, optimizer)
        """With ``automatic``."""
        self._receive: BackgroundReceive | None = None
        self._meter: HealMeter | None = None
        self._failures = 0
        self._aborted: BackgroundReceive | None = None
        """The last transfer that was aborted. Its thread may still wait for an answer."""
        self._last: tuple[QuorumPlan, int, Callable[[], None]] | None = None
        """Of the last step that was followed: its plan, the groups that took part, and what restores its buffers."""
        self._unkept = False
        """Whether the gradients of that step were not kept yet."""
        self._tensors: dict[str, Any] | None = None
        """Of this group's state, which ``hands_out`` copies; None: unknown."""
        self._copies_early = True
        """Whether the registered functions return the tensors of the state, and not copies."""
        self._began = self._advanced_at = 0.0
        self._replayed = 0
        self._watched: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()

    @property
    def following(self) -> bool:
        """Whether the group takes part without weights."""
        return self._log.phase is not Phase.IDLE

    @property
    def source(self) -> str:
        """See ``Follower``."""
        return self._receive.source if self._receive is not None else ""

    @property
    def doubts(self) -> bool:
        """See ``Follower``."""
        return self._doubted is not None and self._doubted == self._context.progress.lineage

    def measure(self, watched: Iterable[nn.Module | Optimizer]) -> str:
        """Decide whether the state is one to catch up with. Return why it is not; empty: it is. Between two steps.

        Args:
            watched: modules and optimizers whose use between two steps reads the weights.
        """
        self._watched = weakref.WeakSet(watched)
        return self._choice.measure()

    def refuse(self, why: str) -> None:
        """Give up, because the script was found to allow no catch-up. Between two steps."""
        if self.following:
            self._give_up(why)

    # ---- in a step

    def can_begin(self, plan: QuorumPlan) -> bool:
        """See ``Follower``."""
        ended = self._aborted is None or self._aborted.ended
        if self.automatic and (self._failures or self.doubts or not self._choice.allows):
            return False
        return plan.max_step > 0 and self._failures < MAX_FAILURES and ended and not self._context.asks.min_groups

    def objection(self, plan: QuorumPlan) -> Exception | None:
        """See ``Follower``."""
        if not self.following or not self._log.is_worth_more(HeldState(plan.max_step, plan.lineage, 0)):
            return None
        return KeepstepError(
            "the groups that this one follows are gone, and its own state is worth more than those of the others"
        )

    def hands_out(self, plan: QuorumPlan) -> None:
        """See ``Follower``."""
        tensors = self._tensors
        if tensors is not None and not self.automatic:  # a script may write through .data while they are copied
            self._context.transport.copy_early(plan.max_step, tensors)

    def check(self, plan: QuorumPlan) -> None:
        """See ``Follower``."""
        if plan.behind:
            self._tensors = None  # a state that is loaded may bring tensors of its own
        if not self.following:
            if not plan.behind:
                self._failures = 0
            return
        if self._unkept:
            self._give_up("the script ended a step without Optimizer.step(), so that its gradients were not kept")
        elif not plan.follows:
            here = f"step {self._context.progress.step}"
            self._give_up(f"the others are at step {plan.max_step} of another history than this group, at {here}")

    def begin(self, plan: QuorumPlan, exchange: Exchange) -> None:
        """See ``Follower``."""
        context, progress = self._context, self._context.progress
        held = HeldState(progress.step, progress.lineage, progress.batches_committed)
        self._doubted = progress.fall_behind() if self.automatic else None
        self._log.begin(held, HeldState(plan.max_step, plan.lineage, plan.reference_batches), self._doubted)
        progress.follow(plan.max_step, plan.lineage, plan.reference_batches)
        context.transport.prepare(exchange)
        self._began, self._replayed = time.monotonic(), 0
        source = plan.members[plan.source].replica_id if plan.source is not None else ""
        self._meter = HealMeter(plan.max_step, source, self._began)
        self._receive = BackgroundReceive(context, plan, self._meter.moved)
        if self.automatic:
            self._thread = threading.get_ident()
            self._reads.watch(self._watched)
        context.steps.write("follows", plan.max_step, plan.quorum_id, lineage=progress.lineage)
        context.log.info("catching up", step=plan.max_step, source=source)

    def followed(self, plan: QuorumPlan, participants: int, write_back: Callable[[], None]) -> None:
        """See ``Follower``."""
        self._last, self._unkept = (plan, participants, write_back), True

    # ---- after a step

    def stepped(self) -> None:
        """Note the tensors of the state, after a step of the optimizer. Call it in all ranks of the group."""
        if self.automatic or self._tensors is not None or not self._copies_early:
            return
        state = self._context.state
        try:
            first, second = state.user_state(), state.user_state()  # both, so that copies do not share memory
            self._copies_early = _memory(first) == _memory(second)
        except Exception as error:  # noqa: BLE001  a heal reports it if it matters
            self._copies_early = False
            self._context.log.debug("state not copied early", reason=f"{type(error).__name__}: {error}")
            return
        self._tensors = {"user": first} if self._copies_early else None

    def advance(self, take: Callable[[], None]) -> bool:
        """Keep the averaged gradients of the step that was committed, and replay. Return whether none is left.

        Call it in all ranks of the group, instead of the step of the optimizer.

        Args:
            take: takes a step with the gradients that the parameters have.

        Raises:
            Exception: as ``take``, unless ``automatic``; the state is torn then.
        """
        now, self._busy, self._take = time.monotonic(), True, take
        try:
            return self._advance(now) and not self.doubts
        finally:
            self._busy = False

    def _advance(self, now: float) -> bool:
        seconds, self._advanced_at = (now - self._advanced_at if self._advanced_at else 0.0), now
        self._keep()
        if self._memory is None and self._receive is not None:
            share = join_choice.GRADIENT_SHARE if self.automatic else 1
            self._log.memory = max(self._log.memory, share * self._receive.moved[1])
        if self.automatic and len(self._log) == 1 and self._receive is not None:
            while not self._receive.ended and (
                pause := join_choice.patience(time.monotonic() - self._began, *self._receive.moved)
            ):
                self._receive.wait(pause)
        if self._log.phase is Phase.RECEIVING and not self._context.ranks.all_ready(not self._log.full):
            self._wait_for_state()
        alone = self._context.ranks.alone  # the ranks of a group must replay equally many steps
        caught_up = self._go_on(REPLAY_SHARE * seconds if alone else 0.0)
        if self.following:
            self._values.mark()
        return caught_up

    def finish(self) -> None:
        """See ``Follower``."""
        if self.following and self._unkept:
            self._give_up("the script ended a step without Optimizer.step()")
        self._busy = True
        try:
            if self.following:
                self._wait_for_state()
                self._go_on(math.inf)
        finally:
            self._busy = False
        if self.following:
            self._give_up("another rank of this group does not have the state in time")

    def settle(self, call: str) -> None:
        """See ``Follower``."""
        if not self.following:
            return
        context, step = self._context, self._context.progress.step
        context.log.info("waiting for the weights that the script reads", step=step, call=call)
        self.finish()
        if not self.doubts and context.progress.step != step:
            raise KeepstepError(
                f"{call} at step {step}: this group catches up, and could not receive the weights of that step; read "
                f"them only while manager.catching_up is False"
            )

    def settle_last(self) -> None:
        """See ``Follower``."""
        try:
            self.settle("Manager.shutdown()")
        except Exception as error:  # noqa: BLE001  the script may not need the weights
            self._context.log.error("the weights are older than the last step", reason=str(error))

    def _on_read(self, call: str) -> None:
        """React to a use of the model or the optimizer."""
        of_script = not (self._busy or self._unkept or self._context.state.reading)
        if of_script and threading.get_ident() == self._thread and self._may_read():
            self.settle(call)

    def close(self) -> None:
        """See ``Follower``."""
        if self._receive is not None:
            self._receive.cancel("the Manager is shut down")
        self._reads.end()

    def _keep(self) -> None:
        if self._last is None:
            raise RuntimeError("no step was followed")
        progress = self._context.progress
        with torch.no_grad():
            kept: Gradients = [None if one.grad is None else self._copied(one.grad) for one in self._parameters()]
        nbytes = sum(one.numel() * one.element_size() for one in kept if one is not None)
        plan = self._last[0]
        told = (f"{plan.quorum_id}/{plan.max_step}", plan.members[plan.cohort[0]].info.address)
        if self.automatic and len(self._log) % ASK_EVERY == 0:
            self._told.ask(told[1])
        # nothing is written for the first step: the state comes with its values
        taken = Taken(kept, self._values.since_mark(), told)
        self._log.keep(FollowedStep(progress.step, followed(str(progress.lineage)), self._last[1], taken, nbytes))
        self._unkept = False

    def _copied(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a copy; in main memory, unless the script asked for it, because the device may have no room."""
        if self.automatic and gradient.device.type != "cpu":
            return gradient.detach().cpu()
        return gradient.detach().clone()

    def _go_on(self, seconds: float) -> bool:
        """Load the state if all ranks have it, and replay for ``seconds``. Return whether the group has caught up."""
        context, receive = self._context, self._receive
        if receive is None:
            return False
        if self._log.phase is Phase.RECEIVING:
            if not context.ranks.all_ready(receive.error is None):
                self._give_up(f"the state was not received: {receive.error or 'another rank failed'}")
                return False
            if not context.ranks.all_ready(receive.state is not None) or not self._load(receive.state or {}):
                return False
        return self._replay(seconds)

    def _wait_for_state(self) -> None:
        """Wait until the transfers of all ranks have ended. Report that of this rank as a heal until then.

        The lighthouse waits for a group that heals. Each rank has a limit of its own, because it counts its own late
        heals. A rank that waits tells the others so in time, and they wait on. Call it in all ranks of the group.
        """
        context, receive, meter = self._context, self._receive, self._meter
        if receive is None or meter is None:
            return
        if receive.ended:
            self._wait_for_ranks()
            return
        timeout_ms = self._last[0].heal_timeout_ms if self._last is not None else 0
        limit = heal_limit(timeout_ms / 1000, context.heals.late) if timeout_ms else LIMIT.total_seconds()
        late_at = time.monotonic() + limit
        context.log.info("waiting for the state", step=context.progress.step, seconds=limit)
        reporting = context.loop_thread.spawn(self._report(meter))
        try:
            while not receive.wait(min(RANK_WAIT_SECONDS, max(0.0, late_at - time.monotonic()))):
                if time.monotonic() >= late_at:
                    context.heals.late += 1
                    receive.cancel(f"it took longer than {limit:g} s")
                    break
                context.ranks.all_ready(False)
        finally:
            reporting.cancel()
        error = "" if receive.error is None else str(receive.error)
        last = meter.last_report(context.transport.via, error, time.monotonic())
        context.loop_thread.loop.call_soon_threadsafe(context.link.healing, last)
        self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        """Wait until no rank of this group waits for its state. A rank that waits says so in time."""
        while not self._context.ranks.all_ready(True, RANK_WAIT_SECONDS):
            self._context.raise_fatal()

    async def _report(self, meter: HealMeter) -> None:
        while True:
            self._context.link.healing(meter.report(self._context.transport.via, time.monotonic()))
            await asyncio.sleep(REPORT_SECONDS)

    def _load(self, state: dict[str, Any]) -> bool:
        """Load the state of the base. Return whether it fits this group."""
        context, progress, base = self._context, self._context.progress, self._log.base
        reached = progress.step
        try:
            sent = int(state["manager"]["step"])
            if sent != base.step:
                raise KeepstepError(f"{self.source} sent step {sent} instead of step {base.step}")
            progress.step = base.step  # parts that count samples go by it
            context.state.check_loaded(context.state.load_user_state(state["user"]))
        except Exception as error:  # noqa: BLE001  whatever broke it, the weights are half written
            self._tear(f"{type(error).__name__}: {error}")
            context.check_heal(error)
            return False
        progress.step = reached
        self._log.arrive(int(state["manager"]["batches_committed"]))
        if self._receive is not None:
            self._receive.state = None
        return True

    def _replay(self, seconds: float) -> bool:
        """Replay for ``seconds``, ``MIN_REPLAYED`` steps at least. Return whether none is left."""
        context, progress = self._context, self._context.progress
        reached, began, replayed = progress.step, time.monotonic(), 0
        context.state.readable = False
        try:
            while replayed < MIN_REPLAYED or time.monotonic() - began < seconds:
                step = self._log.next()
                progress.step = step.step
                self._apply(step.gradients)
                held = self._log.replayed()
                replayed += 1
                self._replayed += 1
                if not self.following:
                    # a single step is taken as by a group that has healed in it
                    self._end(held._replace(lineage=step.lineage) if self._replayed == 1 else held)
                    return True
        except BaseException as error:
            self._tear(f"{type(error).__name__}: {error}")
            if self.automatic and isinstance(error, Exception):  # the script did not say that steps can be replayed
                return False
            raise
        finally:
            context.state.readable = True
        progress.step = reached
        return False

    def _apply(self, taken: Taken) -> None:
        """Take the step that the others have taken."""
        with torch.no_grad():
            self._values.write(taken.written)
            if self.automatic:
                write_told(self._optimizer, self._told.of(*taken.told))
            for parameter, gradient in zip(self._parameters(), taken.gradients, strict=True):
                if gradient is None or parameter.grad is None or gradient.is_sparse:
                    parameter.grad = None if gradient is None else gradient.to(parameter.device)
                else:
                    parameter.grad.copy_(gradient)  # a reducer and a captured graph know its memory
        self._take()

    def _end(self, held: HeldState) -> None:
        """The weights are those of the others."""
        context, receive = self._context, self._receive
        if self._last is not None:
            self._last[2]()  # the state that was loaded has the buffers of the base
        context.progress.hold(*held)
        if self.doubts:
            context.transport.keep_present()
        context.heals.unfit = self._failures = 0
        context.steps.write("caught_up", held.step, 0, lineage=held.lineage)
        moved = receive.moved[0] if receive is not None else 0
        facts = {"steps": self._replayed, "seconds": round(time.monotonic() - self._began, 3), "bytes": moved}
        context.log.info("caught up", step=held.step, **facts)
        self._forget()

    def _give_up(self, reason: str) -> None:
        """Go back to the weights that the group has; it heals in the next quorum."""
        context, progress = self._context, self._context.progress
        held = self._log.give_up()
        if not progress.torn:  # the script may have torn it
            progress.hold(*held)
        self._failures += 1
        context.log.warning("catch-up ended early", step=progress.step, reason=reason, failures=self._failures)
        context.steps.write("gave_up", progress.step, 0, lineage=progress.lineage)
        if self._receive is not None:
            self._aborted = self._receive
            self._receive.cancel(reason)
        self._forget()

    def _tear(self, reason: str) -> None:
        """The weights are half written; the group heals in the next quorum."""
        if self.following:
            self._log.give_up()
        self._failures += 1
        self._context.log.error("catch-up failed", reason=reason, failures=self._failures)
        self._context.tear()
        self._forget()

    def _forget(self) -> None:
        self._receive = self._meter = self._last = None
        self._unkept, self._advanced_at = False, 0.0
        self._values.forget()
        self._told.forget()
        self._reads.end()

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]


def _memory(state: Any) -> list[int]:
    local = [one.to_local() if is_dtensor(one) else one for one in tensors_in(state)]
    return [one.untyped_storage().data_ptr() for one in local if one.layout is torch.strided]
