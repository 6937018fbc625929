"""One process of a group in virtual time: it lives, freezes, and dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.session.session_machine import About
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Quorum, QuorumRequest
from tests.simulation.actors.ports import LINGERS
from tests.simulation.actors.session import Session

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Incarnation:
    """One incarnation of a group, and its session."""

    plan: QuorumPlan | None
    commits: int

    def __init__(self, simulation: Simulation, name: str, number: int) -> None:
        self.sim = simulation
        self.random = simulation.random
        self.name = name
        self.replica_id = f"{name}:{number}"
        self.session = Session(self, simulation.addresses())
        self.info = MemberInfo(f"http://{name}:{number}", "http://here")
        self.alive = True
        self.died_at = 0.0
        self.port_lingers = 0.0
        """Seconds for which its port is open after its connections ended."""
        self.frozen = False
        self.leaving = False
        self.sent_home = False
        """The job has finished without it."""
        self.finished = False
        """It got the answer that all groups have finished."""
        self._inbox: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def about(self) -> About | None:
        """Facts that the group tells the lighthouse."""
        return None

    @property
    def step(self) -> int:
        raise NotImplementedError

    def on_death(self) -> None:
        """Tell the peers, as the kernel does."""

    def on_welcome(self) -> None:
        raise NotImplementedError

    def on_message(self, message: Any) -> None:
        raise NotImplementedError

    def on_quorum(self, quorum: Quorum, asked: QuorumRequest) -> None:
        raise NotImplementedError

    def soon(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        """Call ``act`` after ``delay``, unless the process is dead by then; if it is frozen, when it thaws."""
        self.sim.time.after(delay, self.act, act, args)

    def act(self, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.alive:
            return
        if self.frozen:
            self._inbox.append((act, args))
        else:
            act(*args)

    @property
    def runs(self) -> bool:
        return self.alive and not self.frozen

    def die(self) -> None:
        """End as SIGKILL does. The kernel ends the connections."""
        if self.alive:
            self.alive, self.died_at = False, self.sim.time.now
            if self.sim.ports is not None:
                self.port_lingers = LINGERS * self.sim.ports.random.random()
            self.session.close()
            self.on_death()

    def _exit(self) -> None:
        """End, and be started again by the launcher, unless it has finished."""
        self.die()
        if self.finished or self.sent_home:
            self.sim.on_ended(self)
        else:
            self.sim.launch_later(self.name)

    @property
    def takes_no_step(self) -> bool:
        """Whether it has taken its last step."""
        return self.sim.last_step is not None and self.step >= self.sim.last_step

    def freeze(self, seconds: float) -> None:
        self.frozen = True
        self.sim.time.after(seconds, self._thaw)

    def _thaw(self) -> None:
        if self.frozen:
            self.frozen = False
            inbox, self._inbox = self._inbox, []
            for act, args in inbox:
                self.act(act, args)
