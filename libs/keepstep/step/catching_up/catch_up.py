"""Catch up with the other groups: follow their steps without weights, then replay them on the state that arrived.

The course of a join, on the training thread:

    begin      the step in which the group would heal commits: the transfer of its state begins
    advance    after each commit: keep the averaged gradients; once the state is here, load it and replay steps
    give_up    a step was missed, or the transfer failed: the group heals from the next quorum on

``gradient_log`` decides; ``background_receive`` has the transfer. A group that uses more memory than allowed waits for
the rest of the state, and the others wait for it, as for any group that heals.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.state.values.sharding import is_dtensor
from keepstep.state.values.tensors_in_containers import tensors_in
from keepstep.step.catching_up.background_receive import LIMIT, BackgroundReceive
from keepstep.step.catching_up.gradient_log import FollowedStep, GradientLog, HeldState, Phase
from keepstep.step.catching_up.written_values import Written, WrittenValues
from keepstep.step.context import StepContext
from keepstep.step.reporting.heal_meter import REPORT_SECONDS, HealMeter
from keepstep.transfer.exchange import Exchange
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.lineage import followed
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
LEAST_MEMORY = 256 * 1024 * 1024
"""Default limit of the kept gradients of small models, and while the size of the state is unknown; bytes."""

Gradients = list[torch.Tensor | None]


class Taken(NamedTuple):
    """How the others have taken a step."""

    gradients: Gradients
    """Averaged, one for each parameter."""
    written: Written
    """Values of param groups that the script wrote for this step."""


class CatchUp:
    """The catch-up of one rank. Implements ``Follower``.

    Args:
        context: of this process.
        optimizer: steps with the averaged gradients.
        after_commit: called after each step of the optimizer, also in a replay.
        memory: limit of the kept gradients in bytes. None: the size of the state, ``LEAST_MEMORY`` at least.
    """

    def __init__(
        self,
        context: StepContext,
        optimizer: Optimizer,
        after_commit: Sequence[Callable[[], object]],
        memory: int | None,
    ) -> None:
        self._context = context
        self._optimizer = optimizer
        self._after_commit = after_commit
        self._memory = memory
        self._log: GradientLog[Taken] = GradientLog(memory or LEAST_MEMORY)
        self._values = WrittenValues(optimizer)
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

    @property
    def following(self) -> bool:
        """Whether the group takes part without weights."""
        return self._log.phase is not Phase.IDLE

    @property
    def source(self) -> str:
        """See ``Follower``."""
        return self._receive.source if self._receive is not None else ""

    # ---- in a step

    def can_begin(self, plan: QuorumPlan) -> bool:
        """See ``Follower``."""
        ended = self._aborted is None or self._aborted.ended
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
        if tensors is not None:
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
        self._log.begin(held, HeldState(plan.max_step, plan.lineage, plan.reference_batches))
        progress.follow(plan.max_step, plan.lineage, plan.reference_batches)
        context.transport.prepare(exchange)
        self._began, self._replayed = time.monotonic(), 0
        source = plan.members[plan.source].replica_id if plan.source is not None else ""
        self._meter = HealMeter(plan.max_step, source, self._began)
        self._receive = BackgroundReceive(context, plan, self._meter.moved)
        context.steps.write("follows", plan.max_step, plan.quorum_id, lineage=progress.lineage)
        context.log.info("catching up", step=plan.max_step, source=source)

    def followed(self, plan: QuorumPlan, participants: int, write_back: Callable[[], None]) -> None:
        """See ``Follower``."""
        self._last, self._unkept = (plan, participants, write_back), True

    # ---- after a step

    def stepped(self) -> None:
        """Note the tensors of the state, after a step of the optimizer. Call it in all ranks of the group."""
        if self._tensors is not None or not self._copies_early:
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

    def advance(self) -> bool:
        """Keep the averaged gradients of the step that was committed, and replay. Return whether none is left.

        Call it in all ranks of the group, instead of the step of the optimizer.

        Raises:
            Exception: as the optimizer and ``after_commit``; the state is torn then.
        """
        now = time.monotonic()
        seconds, self._advanced_at = (now - self._advanced_at if self._advanced_at else 0.0), now
        self._keep()
        if self._memory is None and self._receive is not None:
            self._log.memory = max(self._log.memory, self._receive.moved[1])
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
        if self.following:
            self._wait_for_state()
            self._go_on(math.inf)
        if self.following:
            self._give_up("another rank of this group does not have the state in time")

    def close(self) -> None:
        """See ``Follower``."""
        if self._receive is not None:
            self._receive.cancel("the Manager is shut down")

    def _keep(self) -> None:
        if self._last is None:
            raise RuntimeError("no step was followed")
        progress = self._context.progress
        with torch.no_grad():
            kept: Gradients = [None if one.grad is None else one.grad.detach().clone() for one in self._parameters()]
        nbytes = sum(one.numel() * one.element_size() for one in kept if one is not None)
        taken = Taken(kept, self._values.since_mark())  # nothing for the first step: the state comes with its values
        self._log.keep(FollowedStep(progress.step, followed(str(progress.lineage)), self._last[1], taken, nbytes))
        self._unkept = False

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
            context.state.load_user_state(state["user"])
            context.state.check_loaded(state["user"])
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
                    self._end(held)
                    return True
        except BaseException as error:
            self._tear(f"{type(error).__name__}: {error}")
            raise
        finally:
            context.state.readable = True
        progress.step = reached
        return False

    def _apply(self, taken: Taken) -> None:
        """Take the step that the others have taken."""
        with torch.no_grad():
            self._values.write(taken.written)
            for parameter, gradient in zip(self._parameters(), taken.gradients, strict=True):
                if gradient is None or parameter.grad is None or gradient.is_sparse:
                    parameter.grad = gradient
                else:
                    parameter.grad.copy_(gradient)  # a reducer and a captured graph know its memory
        self._optimizer.step()
        for act in self._after_commit:
            act()

    def _end(self, held: HeldState) -> None:
        """The weights are those of the others."""
        context, receive = self._context, self._receive
        if self._last is not None:
            self._last[2]()  # the state that was loaded has the buffers of the base
        context.progress.hold(*held)
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

    def _parameters(self) -> list[torch.Tensor]:
        return [one for group in self._optimizer.param_groups for one in group["params"]]


def _memory(state: Any) -> list[int]:
    local = [one.to_local() if is_dtensor(one) else one for one in tensors_in(state)]
    return [one.untyped_storage().data_ptr() for one in local if one.layout is torch.strided]
