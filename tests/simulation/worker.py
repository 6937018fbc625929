"""A replica group in virtual time: the real session and quorum plan, a model that is one number, and a training loop.

It follows SEMANTICS: ask, heal or not, all-reduce, vote, commit. What it cannot know is left to chance: how long things
take, whether a peer's death is noticed by its sockets, which result arrives first, whether it allows a heal in a round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol.lineage import BEHIND, DIVERGED, is_diverged
from keepstep_mesh.protocol.membership import Lineage, MemberInfo, Quorum, StateRoot
from keepstep_mesh.protocol.messages import (
    CancelRequest,
    Denied,
    Drain,
    Evicted,
    Failed,
    Goodbye,
    Healing,
    Leave,
    MemberLost,
    QuorumAnswer,
    QuorumRequest,
    Refused,
    RoundBroken,
    Welcome,
)
from keepstep_mesh.session.session_machine import SessionCore
from tests.simulation.network import FIN, Connection

if TYPE_CHECKING:
    from tests.simulation.training import Training

COLLECTIVE_TIMEOUT = 1000.0
"""Longer than any simulation: who waits for a peer that will not come has to be told."""
REQUEST_TIMEOUT = 25.0
HEAL_REPORT = 0.5


class Collective:
    """One all-reduce of the members of one quorum. Complete when all have put their part in."""

    def __init__(self, members: tuple[str, ...], facts: tuple[int, Lineage, bool]) -> None:
        self.members = members
        self.facts = facts
        self.parts: dict[str, tuple[Worker, int | None]] = {}
        self.dead = False

    def result(self) -> int:
        return hash(tuple(sorted((who, part) for who, (_, part) in self.parts.items() if part is not None)))


class Worker:
    """One incarnation. ``part`` of a healing group in the collective is None: zeros, not in the divisor."""

    def __init__(self, simulation: Training, name: str, number: int) -> None:
        self.sim = simulation
        self.random = simulation.random
        self.name = name
        self.replica_id = f"{name}:{number}"
        self.session = SessionCore(self.replica_id)
        self.connection: Connection | None = None
        self.welcomed = False
        self.alive = True
        self.frozen = False
        self.leaving = False
        self.banned = False
        self.step = 0
        self.lineage: Lineage = self.replica_id
        self.state = hash(self.replica_id)
        self.flipped = False
        """A bit of its state went wrong, and it has not healed."""
        self.root: StateRoot | None = None
        self.failures = 0
        self.commits = 0
        self.shrink_next = False
        self.fail_next = False
        self.plan: QuorumPlan | None = None
        self.snapshot: tuple[int, int, Lineage, int] | None = None
        """(quorum_id, step, lineage, state) that others may heal from."""
        self._attempt = 0
        self._errored = False
        self._backward_done = False
        self._behind = False
        self._fetched: int | None = None
        self._healed: bool | None = None
        """None: not yet; False: it failed."""
        self._result: int | None = None
        self._collective: Collective | None = None
        self._configured: tuple[int, int] = (0, 0)
        """quorum_id that the process group was made for, collectives done in it."""
        self._inbox: list[tuple[Connection, Any]] = []
        simulation.know(self)
        simulation.logs.step(self, "started", lineage=self.lineage)
        self.connect()

    # ---- life

    def soon(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        self.sim.time.after(delay, self._act, act, args)

    def _act(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._inbox.append((act, args))  # type: ignore[arg-type]
        else:
            act(*args)

    def die(self) -> None:
        """SIGKILL. Its kernel ends the connections."""
        if self.alive:
            self.alive = False
            if self.connection is not None:
                self.connection.close(self)
            self._drop_collective()

    def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.sim.time.after(seconds, self.thaw)

    def thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            inbox, self._inbox = self._inbox, []
            for act, args in inbox:
                self._act(act, args)  # type: ignore[arg-type]

    # ---- session

    def connect(self) -> None:
        if self.connection is None and not self.banned:
            self.connection = self.sim.dial(self)
            if self.connection is None:
                self.soon(0.02 + 0.3 * self.random.random(), self.connect)
            else:
                self.connection.send(self, self.session.hello())
                self.soon(5.0, self._give_up_on, self.connection)

    def _give_up_on(self, connection: Connection) -> None:
        """No welcome in time, or a lighthouse that fell silent: another connection."""
        if self.connection is connection and not self.welcomed:
            self.hang_up()

    def hang_up(self) -> None:
        if self.connection is not None:
            self.connection.close(self)
            self.connection, self.welcomed = None, False
            self.connect()

    def receive(self, connection: Connection, message: Any) -> None:
        self._act(self._receive, (connection, message))

    def _receive(self, connection: Connection, message: Any) -> None:
        if connection is not self.connection:
            return
        match message:
            case QuorumAnswer():
                self._answered(message)
            case Welcome():
                self._check(self.session.welcomed, message)
                self.welcomed = True
                if self.leaving and self.plan is None:
                    self._say(Leave("told to"))
                elif (request := self.session.to_send(int(REQUEST_TIMEOUT * 1000))) is not None:
                    self._say(request)
                elif self.session.open is None and self.plan is None:
                    self.ask()
            case Denied(request):
                if self.session.withdraw(request):
                    self.soon(0.05, self.ask)
            case MemberLost(quorum_id) | RoundBroken(quorum_id):
                if self.plan is not None and self.plan.quorum_id == quorum_id:
                    self._abort()
            case Drain():
                self.leaving = True
            case Evicted():
                self.die()
                self.sim.launch_later(self.name)
            case Goodbye():
                self.die()
                self.sim.launch_later(self.name)
            case Refused(code):
                if code == "banned":
                    self.die()
                    self.sim.launch_later(self.name)
            case _ if message is FIN:
                self.connection, self.welcomed = None, False
                self.connect()

    def _say(self, message: Any) -> None:
        if self.connection is not None and self.welcomed:
            self.connection.send(self, message)

    def _check(self, act: Callable[[Any], Any], message: Any) -> Any:
        try:
            return act(message)
        except ProtocolError as error:
            self.sim.violated(f"{self.replica_id} refuses {type(message).__name__}: {error}")

    # ---- the training loop

    def ask(self) -> None:
        if self.session.open is not None or self.plan is not None:
            return
        if self.leaving:
            self._say(Leave("told to"))
            return
        request = self.session.ask(
            self.step,
            self.lineage,
            INFO,
            int(REQUEST_TIMEOUT * 1000),
            shrink_only=self.shrink_next,
            commit_failures=self.failures,
            root=self.root,
            allow_heal=self.sim.allows_heal(),
        )
        self.shrink_next = False
        if self.welcomed and (sent := self.session.to_send(request.timeout_ms)) is not None:
            self._say(sent)
        self.soon(REQUEST_TIMEOUT, self.give_up, request)

    def give_up(self, request: QuorumRequest) -> None:
        if self.session.withdraw(request.request):
            self._say(CancelRequest(request.request))
            self.soon(0.05 + self.random.random(), self.ask)

    def _answered(self, answer: QuorumAnswer) -> None:
        asked = self.session.open
        quorum: Quorum | None = self._check(self.session.answered, answer)
        if quorum is None or asked is None:
            return
        if quorum.allow_heal and not asked.allow_heal:
            self.sim.violated(f"{self.replica_id} allows no heal, and is in a round with healing")
        self.plan = plan = make_plan(quorum, self.replica_id)
        self.sim.check_plan(self, plan)
        self.root = None
        if plan.verify and not plan.heal:
            self.root = StateRoot(plan.max_step, plan.lineage, f"{self.state:x}")
        if plan.diverged and not is_diverged(self.lineage):
            self.lineage = f"{DIVERGED}{self.replica_id}"
            self.sim.logs.step(self, "diverged", lineage=self.lineage)
        self._attempt += 1
        self._errored, self.fail_next = self.fail_next, False
        self._backward_done, self._collective, self._result = False, None, None
        self._behind = plan.heal and not plan.allow_heal
        self._healed, self._fetched = None if plan.heal and plan.allow_heal else True, None
        if self._configured[0] != plan.quorum_id:
            self._configured = (plan.quorum_id, 0)
        if self._healed is None:
            self._say(Healing(0, 100, 10.0))
            self.soon(0.02 + 0.05 * self.random.random(), self._fetch, self._attempt)
            seconds = self.sim.slow_heals.pop(self.name, 0.1 + 0.3 * self.random.random())
            self.soon(seconds, self._heal, self._attempt)
        elif not plan.heal:
            self.snapshot = (plan.quorum_id, plan.max_step, plan.lineage, self.state)
        if not self._heals_first(plan):
            self.soon(0.1 + 0.4 * self.random.random(), self._reduce, self._attempt)

    @staticmethod
    def _heals_first(plan: QuorumPlan) -> bool:
        """At the very first step all take part, healed."""
        return plan.heal and plan.allow_heal and plan.max_step == 0

    def _fetch(self, attempt: int) -> None:
        """The source begins to send what it has for this step; that stays whole even if the source goes on."""
        plan = self.plan
        if plan is not None and attempt == self._attempt and plan.source is not None:
            source = self.sim.workers[plan.members[plan.source].replica_id]
            there = source.alive and source.snapshot is not None and not self.sim.parted(self, source)
            if there and source.snapshot is not None:
                wanted = (plan.quorum_id, plan.max_step, plan.lineage)
                self._fetched = source.snapshot[3] if source.snapshot[:3] == wanted else None

    def _heal(self, attempt: int) -> None:
        """All bytes are here, or will never be. What was healed is kept even if the step does not commit."""
        plan = self.plan
        if plan is None or attempt != self._attempt or plan.source is None:
            return
        if self._fetched is None:
            self._fetch(attempt)
        self._healed = self._fetched is not None and self.sim.workers[plan.members[plan.source].replica_id].alive
        if self._healed and self._fetched is not None:
            self.step, self.lineage, self.state = plan.max_step, plan.lineage, self._fetched
            self.flipped = False
            self.sim.logs.step(self, "healed", lineage=self.lineage)
            self.sim.check_state(self)
        else:
            self._errored = self._errored or self._heals_first(plan)
        if self._heals_first(plan):
            self._reduce(attempt)
        else:
            self._vote()

    def _reduce(self, attempt: int) -> None:
        """Backward is over: the gradients are averaged with those of the others."""
        plan = self.plan
        if plan is None or attempt != self._attempt:
            return
        self._backward_done = True
        if self._errored:
            self._vote()
            return
        quorum_id, done = self._configured
        self._configured = (quorum_id, done + 1)
        heals_later = plan.heal and plan.allow_heal and plan.max_step > 0
        gradient = None if heals_later else hash((self.state, self.replica_id))
        self._collective = self.sim.collective((quorum_id, done), plan, self)
        self.soon(COLLECTIVE_TIMEOUT, self._collective_timed_out, attempt)
        self.sim.contribute(self._collective, self, gradient)

    def reduced(self, collective: Collective, result: int | None) -> None:
        """The all-reduce is over for this group; None: it failed here."""
        if self.frozen or not self.alive:
            self._act(self.reduced, (collective, result))
        elif collective is self._collective and self._result is None and not self._errored:
            self._result = result
            if result is None:
                self._abort()
            self._vote()

    def _collective_timed_out(self, attempt: int) -> None:
        if attempt == self._attempt and self._collective is not None:
            self._abort()

    def _abort(self) -> None:
        """Fails what is not finished: the collective in flight, or the one that is to come. A heal goes on."""
        if self.plan is not None and self._result is None and not self._errored:
            self._errored = True
            self._drop_collective()
            self._vote()

    def _drop_collective(self) -> None:
        if self._collective is not None and self._result is None:
            self.sim.drop(self._collective, self)

    def _vote(self) -> None:
        plan = self.plan
        reduced = self._backward_done and (self._errored or self._result is not None)
        if plan is None or not reduced or self._healed is None:
            return
        if self._errored or not self._healed or self._result is None:
            self.failures += 1
            self.sim.logs.step(self, "discarded")
        else:
            self.state = hash((self.state, self._result))
            before, participants = self.lineage, plan.max_world_size
            if plan.max_step == 0 or not plan.allow_heal:
                participants = len(plan.members)
            facts: dict[str, Any] = {"lineage": before, "participants": participants}
            if self._behind:
                self.step += 1
                if not is_diverged(self.lineage):
                    self.lineage = f"{BEHIND}{self.replica_id}:{self.commits}"  # it holds weights that nobody else has
                self.sim.logs.step(self, "committed", behind=True, new_lineage=self.lineage, **facts)
            else:
                self.step, self.lineage = plan.max_step + 1, plan.quorum_id
                self.sim.logs.step(self, "committed", **facts)
            self.failures = 0
            self.commits += 1
            self.sim.check_state(self)
        self.session.finished_step()
        self.plan = None
        self.soon(0.01 + 0.03 * self.random.random(), self.ask)

    def fail_commit(self) -> None:
        """The step does not commit here, though the all-reduce completes for the others."""
        if self._collective is not None and self._result is None and not self._errored:
            self._errored = True
            self._vote()

    def flip_a_bit(self) -> None:
        self.state ^= 1
        self.flipped = True
        self.sim.flips += 1

    @property
    def contributed(self) -> bool:
        return self._collective is not None and self._result is None

    def rank_dies(self) -> None:
        """Its rank 0 says so, and all exit."""
        self._say(Failed("rank 1 died"))
        self.die()


INFO = MemberInfo("http://here", "http://here")
