"""A replica group in virtual time: the real session, plan and progress; a model that is one number; a training loop.

The loop follows SEMANTICS: ask, heal or not, all-reduce, vote, commit. Chance decides the rest: how long things take,
whether sockets report the death of a peer, which result arrives first, whether the group allows a heal in a round.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.session.session_machine import About
from keepstep.step.progress import GroupProgress
from keepstep.step.retrying.retry_rules import FailedTry, obstacle
from keepstep_mesh.protocol.lineage import is_diverged, is_following
from keepstep_mesh.protocol.membership import (
    PUBLISHED,
    TO_PUBLISH,
    UNPUBLISHED,
    FinalState,
    Lineage,
    StateRoot,
    StepFailure,
)
from keepstep_mesh.protocol.messages import (
    CancelRequest,
    Closed,
    Denied,
    Drain,
    Evicted,
    Failed,
    Goodbye,
    Healing,
    Leave,
    MemberLost,
    Quorum,
    QuorumRequest,
    Refused,
    RoundBroken,
)
from keepstep_mesh.protocol.stack_messages import Hung, StacksRequest
from tests.simulation.actors.collectives import TIMEOUT_SECONDS, Collective
from tests.simulation.actors.following import Following
from tests.simulation.actors.incarnation import Incarnation
from tests.simulation.actors.training_thread import TrainingThread
from tests.simulation.actors.troubles import TROUBLES_TIMEOUT_SECONDS, Trouble, Troubles
from tests.simulation.checks.states import Checkpoint

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

REQUEST_TIMEOUT = 25.0
REQUEST_TIMEOUT_MS = int(REQUEST_TIMEOUT * 1000)


class Worker(Incarnation):
    """A group with a full copy of the model. ``checkpoint``: the state that it resumes from."""

    def __init__(self, simulation: Simulation, name: str, number: int, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(simulation, name, number)
        self.leaves_soon = ""
        """Why it asks for a spare."""
        self.published = False
        self.progress = GroupProgress(self.replica_id, self.replica_id)
        self.state = hash(self.replica_id)
        """The weights."""
        self.flipped = False
        """A bit of the state flipped, and the group has not healed since."""
        self.root: StateRoot | None = None
        self.commits = 0
        self.shrink_next = False
        self.fail_next = False
        self.plan: QuorumPlan | None = None
        self.following = Following(self)
        self.thread = TrainingThread(self)
        self.failure: StepFailure | None = None
        """Evidence about the last step, for the next request."""
        self.snapshot: tuple[int, int, Lineage, int] | None = None
        """(quorum_id, step, lineage, state) that others may heal from."""
        self._attempt = 0
        self._errored = self._own_error = False
        self._retries = 0
        """Of the present step."""
        self._gradient: tuple[int, int] | None = None
        """Of the last backward pass, and the state that it is of."""
        self._backward_done = False
        self._behind = self._follows = False
        self._fetched: int | None = None
        self._healed: bool | None = None
        """None: not yet. False: the heal failed."""
        self._result: int | None = None
        self._collective: Collective | None = None
        self._configured: tuple[int, int] = (0, 0)
        """quorum_id of the process group, and the number of collectives done in it."""
        simulation.add_worker(self)
        simulation.states.check_state(self)
        simulation.logs.step(self, "started", lineage=self.lineage)
        if checkpoint is not None:
            self._resume(checkpoint)
        self.session.connect()

    @property
    def about(self) -> About | None:
        return self.sim.spares.about if self.sim.spares else None

    @property
    def _troubles(self) -> Troubles | None:
        return self.sim.troubles

    def _has(self, trouble: Trouble) -> bool:
        return self._troubles is not None and self._troubles.has(self.name, trouble)

    @property
    def step(self) -> int:
        return self.progress.step

    @property
    def lineage(self) -> Lineage:
        return self.progress.lineage

    # ---- life

    # ---- checkpoints

    def _resume(self, checkpoint: Checkpoint) -> None:
        self.progress.resume(checkpoint.manager)
        self.state = checkpoint.state
        self.sim.logs.step(self, "loaded", lineage=self.lineage)
        self.sim.states.loaded(self, checkpoint)

    def _save(self) -> None:
        if not self.flipped:
            checkpoint = Checkpoint(self.step, self.lineage, self.progress.state_dict(), self.state)
            self.sim.checkpoints.append(checkpoint)

    # ---- messages of the lighthouse

    def on_welcome(self) -> None:
        if self.finished:
            self.session.send(Leave("shutdown", "finished", self.step))
        elif self.leaving and self.plan is None:
            self.session.send(Leave("told to"))
        elif (request := self.session.core.to_send(REQUEST_TIMEOUT_MS)) is not None:
            self.session.send(request)
        elif self.plan is None:
            self.ask()

    def on_message(self, message: Any) -> None:
        match message:
            case Denied(request):
                retry = self.session.core.open is not None and self.session.core.open.retry
                if not self.session.core.withdraw(request):
                    return
                if retry:
                    self._discard()
                elif message.code == "deadline":
                    self.soon(0.05, self.ask)
                else:  # the job is closed, or the group cannot finish: its launcher does not start it again
                    self.die()
                    self.sim.on_ended(self)
            case Closed(request, state):
                if self.session.core.withdraw(request):
                    self._finish(state)
            case MemberLost(quorum_id) | RoundBroken(quorum_id):
                if isinstance(message, MemberLost) and self._troubles is not None:
                    self._troubles.member_lost(self, quorum_id)
                if self.plan is not None and self.plan.quorum_id == quorum_id and not self.plan.finishing:
                    self._abort()
            case Drain(reason):
                self.leaving, self.sent_home = True, reason.startswith("the job finished")
            case StacksRequest(number):
                self.session.send(self.thread.stacks(number))
            case Hung():
                if self.sim.hangs is not None:
                    self.sim.hangs.on_ended(self)
                self._exit()
            case Evicted() | Goodbye() | Refused("banned"):
                self._exit()

    def _finish(self, state: FinalState) -> None:
        self.finished = True
        self.sim.logs.step(self, "finished", lineage=self.lineage, closed_ms=state.closed_ms)
        self.sim.states.finished(self, state)
        self.session.send(Leave("shutdown", "finished", self.step))

    # ---- the training loop

    def ask(self, *, retry: bool = False) -> None:
        session = self.session
        if session.core.open is not None or self.plan is not None or self.finished:
            return
        if self.thread.trouble is not None and self.thread.holds(partial(self.ask, retry=retry)):
            return
        if self.leaving and not retry:
            session.send(Leave("told to"))
            return
        if self.takes_no_step and self.following.active:
            self.following.give_up()
        publish = PUBLISHED if self.published else TO_PUBLISH if self.sim.publishes else UNPUBLISHED
        number = session.core.ask(
            QuorumRequest(
                request=0,
                step=self.step,
                lineage=self.lineage,
                shrink_only=self.shrink_next or retry,
                commit_failures=max(self.progress.commit_failures, 1 if retry else 0),
                timeout_ms=REQUEST_TIMEOUT_MS,
                info=self.info,
                root=self._root(self.step, self.lineage) if self.takes_no_step and self.commits else self.root,
                allow_heal=self.takes_no_step or self.sim.allows_heal(),
                final=self.takes_no_step,
                publish=publish if self.takes_no_step else "",
                failure=self.failure,
                retry=retry,
                replace=self.leaves_soon,
            )
        )
        self.shrink_next, self.failure = False, None
        if session.welcomed and (sent := session.core.to_send(REQUEST_TIMEOUT_MS)) is not None:
            session.send(sent)
        self.soon(REQUEST_TIMEOUT, self.cancel, number)

    def _root(self, step: int, lineage: Lineage) -> StateRoot:
        return StateRoot(step, lineage, f"{self.state:x}")

    def cancel(self, number: int) -> None:
        retry = self.session.core.open is not None and self.session.core.open.retry
        if self.session.core.withdraw(number):
            self.session.send(CancelRequest(number))
            if retry:
                self._discard()
                return
            self.soon(0.05 + self.random.random(), self.ask)

    def on_quorum(self, quorum: Quorum, asked: QuorumRequest) -> None:
        self.plan = plan = make_plan(quorum, self.replica_id)
        self.sim.states.check_plan(self, plan, asked)
        self.sim.states.check_reference(quorum, plan)
        self.root = None
        if plan.verify and not plan.behind and not is_following(plan.lineage):
            self.root = self._root(plan.max_step, plan.lineage)
        if plan.diverged and not is_diverged(self.lineage):
            self.progress.diverge()
            self.sim.logs.step(self, "diverged", lineage=self.lineage)
        self._attempt += 1
        self._errored = self._own_error = self.fail_next or self._has("fails")
        self.fail_next = False
        self._backward_done, self._collective, self._result = False, None, None
        objects = not self.following.check(plan)
        self._errored = objects or self._errored
        self._behind = plan.heal and not plan.allow_heal
        self._follows = plan.heal and plan.allow_heal and self.sim.catches_up and plan.max_step > 0
        self._follows = self._follows and not plan.finishing and not self.following.doubts
        waits = plan.heal and plan.allow_heal and not self._follows and not objects
        self._healed, self._fetched = None if waits else True, None
        if self._configured[0] != plan.quorum_id:
            self._configured = (plan.quorum_id, 0)
        if not asked.retry:
            self._retries, self._gradient = 0, None
        if self._healed is None:
            self.session.send(Healing(0, 100, 10.0))
            self.soon(0.02 + 0.05 * self.random.random(), self._fetch, self._attempt)
            seconds = self.sim.slow_heals.pop(self.name, 0.1 + 0.3 * self.random.random())
            self.soon(seconds, self._heal, self._attempt)
        elif not plan.behind:
            self.snapshot = (plan.quorum_id, plan.max_step, plan.lineage, self.state)
        if plan.finishing:
            if self._healed is not None:
                self._end_finishing()
        elif asked.retry:
            others = self._gradient is None or self._gradient[1] != self.state
            if not plan.follows and (plan.behind or others):
                self.sim.violated(f"{self.replica_id} retries the step after {plan.max_step} with other gradients")
            self._reduce(self._attempt)
        elif self._healed or not self._heals_first(plan):
            self.soon(0.1 + 0.4 * self.random.random(), self._reduce, self._attempt)

    @staticmethod
    def _heals_first(plan: QuorumPlan) -> bool:
        """Whether the group heals before it trains: at the first step all groups take part, healed."""
        return plan.heal and plan.allow_heal and plan.max_step == 0

    def _fetch(self, attempt: int) -> None:
        """Take the source's snapshot of this step. It stays whole even if the source goes on."""
        plan = self.plan
        if plan is not None and attempt == self._attempt and plan.source is not None:
            source = self.sim.workers[plan.members[plan.source].replica_id]
            partitioned = self.sim.collectives.is_partitioned(self.name, source.name)
            if source.alive and source.snapshot is not None and not partitioned:
                wanted = (plan.quorum_id, plan.max_step, plan.lineage)
                self._fetched = source.snapshot[3] if source.snapshot[:3] == wanted else None

    def _heal(self, attempt: int) -> None:
        """End the heal, successful or not. A group that healed keeps the state even if the step does not commit."""
        plan = self.plan
        if plan is None or attempt != self._attempt or plan.source is None:
            return
        if self._fetched is None:
            self._fetch(attempt)
        self._healed = self._fetched is not None and self.sim.workers[plan.members[plan.source].replica_id].alive
        self._healed = self._healed and not self._has("heals in vain")
        if self._healed and self._fetched is not None:
            self.progress.step, self.progress.lineage, self.state = plan.max_step, plan.lineage, self._fetched
            self.flipped = False
            self.sim.logs.step(self, "healed", lineage=self.lineage)
            self.sim.states.check_state(self)
        else:
            self._errored = self._errored or self._heals_first(plan)
        if plan.finishing:
            self._end_finishing()
        elif self._heals_first(plan):
            self._reduce(attempt)
        else:
            self._vote()

    def _end_finishing(self) -> None:
        """End a quorum in which no group takes a step. When all have the final state, publish it."""
        self.published = self.published or (self.sim.publishes and self.plan is not None and not self.plan.healing)
        if not self._healed:
            self.progress.discard()
        self.session.core.finished_step()
        self.plan = None
        self.soon(0.01 + 0.03 * self.random.random(), self.ask)

    def _reduce(self, attempt: int) -> None:
        """Average the gradients with the other groups: the backward pass is done."""
        plan = self.plan
        if plan is None or attempt != self._attempt:
            return
        if self.thread.trouble is not None and self.thread.holds(self._reduce, attempt):
            return
        self._backward_done = True
        if self._errored:
            self._vote()
            return
        quorum_id, done = self._configured
        self._configured = (quorum_id, done + 1)
        heals_later = plan.heal and plan.allow_heal and plan.max_step > 0
        heals_later = heals_later or plan.follows
        self._gradient = self._gradient or (hash((self.state, self.replica_id)), self.state)
        self._collective = self.sim.collectives.begin((quorum_id, done), plan, self)
        self.sim.collectives.contribute(self._collective, self, None if heals_later else self._gradient[0])
        limit = TIMEOUT_SECONDS if self._troubles is None else TROUBLES_TIMEOUT_SECONDS
        self.soon(limit, self.on_reduced, self._collective, None)

    def on_reduced(self, collective: Collective, result: int | None) -> None:
        """The all-reduce ended for this group. ``result`` None: it failed here."""
        if not self.runs:
            self.act(self.on_reduced, (collective, result))
        elif collective is self._collective and self._result is None and not self._errored:
            self._result = result
            if result is None:
                self._abort()
            self._vote()

    def _abort(self) -> None:
        """Fail the collective in flight, or the next one. A heal goes on."""
        if self.plan is not None and self._result is None and not self._errored:
            self._errored = True
            self._abandon_collective()
            self._vote()

    def on_death(self) -> None:
        self._abandon_collective()

    def _abandon_collective(self) -> None:
        if self._collective is not None and self._result is None:
            self.sim.collectives.abandon(self._collective, self)

    def _vote(self) -> None:
        plan = self.plan
        reduced = self._backward_done and (self._errored or self._result is not None)
        if plan is None or not reduced or self._healed is None:
            return
        self.session.core.finished_step()
        if self._errored or not self._healed or self._result is None:
            if self._troubles is not None:
                self.failure = self._troubles.evidence(self, plan, own=self._own_error)
            behind = plan.behind and not plan.follows
            failed = FailedTry(self._retries, self._own_error, behind, ending=False, unrepeatable="")
            if self.sim.retries and self._gradient is not None and not obstacle(failed):
                self.sim.logs.step(self, "retried")
                self.plan, self._retries = None, self._retries + 1
                self.ask(retry=True)
                return
            self._discard()
            return
        self._commit(plan, self._result)
        self.plan = None
        self.soon(0.01 + 0.03 * self.random.random(), self.ask)

    def _discard(self) -> None:
        self.progress.discard()
        self.sim.logs.step(self, "discarded")
        self.plan = None
        self.soon(0.01 + 0.03 * self.random.random(), self.ask)

    def _commit(self, plan: QuorumPlan, result: int) -> None:
        participants = plan.max_world_size
        if self._follows:
            self.following.begin(plan)
        elif not self.following.active:
            self.state = hash((self.state, result))
        before, follows = self.lineage, self.following.active
        if plan.max_step == 0 or not plan.allow_heal:
            participants = len(plan.members)
        self.progress.commit(plan.quorum_id, participants, behind=self._behind)
        facts: dict[str, Any] = {"lineage": before, "participants": participants}
        if self._behind or follows:
            facts["behind"] = True
        if self.lineage != plan.quorum_id:
            facts["new_lineage"] = self.lineage
        self.sim.logs.step(self, "committed", **facts)
        self.commits += 1
        self.sim.states.committed(self, plan, behind=self._behind)
        if follows:
            self.following.keep(result, participants)
        else:
            self._save()

    # ---- faults

    def get_notice(self, seconds: float) -> None:
        """Ask for a spare, and leave after ``seconds``."""
        self.leaves_soon = "notice"
        self.soon(seconds, setattr, self, "leaving", True)

    def refuse_next(self) -> None:
        self.fail_next = True

    def fail_commit(self) -> None:
        """Fail the step in this group only: the all-reduce completes for the others."""
        if self.contributed and not self._errored:
            self._errored = self._own_error = True
            self._vote()

    def flip_a_bit(self) -> None:
        self.state ^= 1
        self.flipped = True
        self.sim.states.flips += 1

    @property
    def contributed(self) -> bool:
        """Whether the group waits for the result of an all-reduce."""
        return self._collective is not None and self._result is None

    @property
    def waits_for_state(self) -> bool:
        """Whether the group waits for the state of another one."""
        return self.plan is not None and self._healed is None

    def lose_a_rank(self) -> None:
        """Rank 0 reports the death of another rank, and all ranks exit."""
        self.session.send(Failed("rank 1 died"))
        self.die()
