"""A member of a job whose model exists once, in virtual time: the real session, and its ranks."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep.group.ranks.merging import DisagreeError, merge_asks, merge_shards
from keepstep.session.session_machine import About
from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.messages import (
    CancelRequest,
    Closed,
    Denied,
    Drain,
    Evicted,
    Failed,
    Goodbye,
    Leave,
    MemberLost,
    Quorum,
    QuorumRequest,
    Refused,
    RoundBroken,
    ShardReport,
    StepRequest,
)
from tests.simulation.actors.incarnation import Incarnation
from tests.simulation.actors.trainer import Trainer
from tests.simulation.actors.worker import REQUEST_TIMEOUT, REQUEST_TIMEOUT_MS

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Member(Incarnation):
    """One incarnation of a member. Its ranks ask together."""

    def __init__(self, simulation: Simulation, name: str, number: int) -> None:
        super().__init__(simulation, name, number)
        assert simulation.shards is not None
        self.shards = simulation.shards
        self.trainers = [Trainer(self, rank) for rank in range(self.shards.ranks)]
        self.lost: set[int] = set()
        """Quorums that have ended."""
        self.lost_members: dict[int, set[str]] = {}
        """By quorum."""
        self.plan: QuorumPlan | None = None
        self.leaves_soon = ""
        self.hangs_until = 0.0
        """It sends heartbeats until then, and asks for no quorum."""
        self.full = False
        """Whether it has no memory for further copies."""
        self._reports: dict[int, ShardReport] = {}
        simulation.add_worker(self)
        self.session.connect()

    @property
    def about(self) -> About | None:
        return self.sim.shards.about if self.sim.shards else None

    @property
    def step(self) -> int:
        return max(one.step for one in self.trainers)

    @property
    def commits(self) -> int:  # type: ignore[override]
        """Steps of the rank that has committed the fewest."""
        return min(one.commits for one in self.trainers)

    def on_death(self) -> None:
        for one in self.trainers:
            one.vanish()

    # ---- messages of the lighthouse

    def on_welcome(self) -> None:
        if (report := self.session.core.shards_to_send()) is not None:
            self.session.send(report)
        if self.finished:
            self.session.send(Leave("shutdown", "finished", self.step))
        elif (request := self.session.core.to_send(REQUEST_TIMEOUT_MS)) is not None:
            self.session.send(request)
        else:
            self.ask()

    def on_message(self, message: Any) -> None:
        match message:
            case Denied(request):
                if self.session.core.withdraw(request):
                    self._denied(message.code)
            case Closed(request, state):
                if self.session.core.withdraw(request):
                    self._finish(state)
            case MemberLost(quorum_id) | RoundBroken(quorum_id):
                self.lost.add(quorum_id)
                if isinstance(message, MemberLost):
                    self.lost_members.setdefault(quorum_id, set()).add(message.replica_id)
                for one in self.trainers:
                    self.soon(0.003 * self.random.random(), one.hear_of_loss, quorum_id)
            case Drain(reason):
                self.leaving, self.sent_home = True, reason.startswith("the job finished")
            case Evicted() | Goodbye() | Refused("banned"):
                self._exit()

    def _denied(self, code: str) -> None:
        if code == "deadline":
            self.soon(0.05, self.ask)
        else:
            self.die()
            self.sim.on_ended(self)

    def _finish(self, state: FinalState) -> None:
        self.finished = True
        self.shards.finished(self, state.step)
        self.session.send(Leave("shutdown", "finished", self.step))

    # ---- quorums

    def ask(self) -> None:
        """Ask for a quorum, when all ranks do."""
        session = self.session
        if self.finished or session.core.open is not None or not all(one.idle for one in self.trainers):
            return
        if self.hangs_until > self.sim.time.now:
            self.soon(self.hangs_until - self.sim.time.now, self.ask)
            return
        if self.plan is not None:
            session.core.finished_step()
            self.plan = None
        if self.leaving and any(one.lets_go for one in self.trainers):
            session.send(Leave("told to"))
            return
        try:
            merged = merge_asks({one.group_rank: one.asks() for one in self.trainers}, self.replica_id)
        except DisagreeError as error:
            self.sim.violated(str(error))
            return
        values = {field.name: getattr(merged, field.name) for field in fields(StepRequest)}
        number = session.core.ask(
            QuorumRequest(
                **{**values, "timeout_ms": REQUEST_TIMEOUT_MS, "info": self.info, "replace": self.leaves_soon}
            )
        )
        if session.welcomed and (sent := session.core.to_send(REQUEST_TIMEOUT_MS)) is not None:
            session.send(sent)
        self.soon(REQUEST_TIMEOUT, self.cancel, number)

    def cancel(self, number: int) -> None:
        if self.session.core.withdraw(number):
            self.session.send(CancelRequest(number))
            self.soon(0.05 + self.random.random(), self.ask)

    def on_quorum(self, quorum: Quorum, asked: QuorumRequest) -> None:
        self.plan = plan = make_plan(quorum, self.replica_id)
        if asked.final and not plan.finishing:
            self.sim.violated(f"{self.replica_id} has finished, and is in quorum {plan.quorum_id}, which trains")
        for one in self.trainers:
            one.idle = False
            self.soon(0.003 * self.random.random(), one.answered, plan)

    def report(self, group_rank: int, told: ShardReport) -> None:
        """Send the report of the member, merged from those of its ranks."""
        self._reports[group_rank] = told
        if (merged := merge_shards(self._reports, len(self.trainers))) is not None:
            self.session.core.shards = merged
            if self.session.welcomed:
                self.session.send(self.session.core.shards_to_send())

    # ---- faults

    def get_notice(self, seconds: float) -> None:
        """Leave after ``seconds``."""
        self.soon(seconds, setattr, self, "leaving", True)

    def refuse_next(self) -> None:
        """One rank finds a gradient that is not finite."""
        self.random.choice(self.trainers).refuses = True

    def lose_a_rank(self) -> None:
        """One rank dies, then the others."""
        self.random.choice(self.trainers).vanish()
        self.soon(0.001 + 0.2 * self.random.random(), self._end_all)

    def _end_all(self) -> None:
        self.session.send(Failed("rank 1 died"))
        self.die()
