"""How this group joins a job that trains: it catches up, or heals while the others wait. On the training thread."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from keepstep.group.agreement import FixedLines
from keepstep.lifecycle.manager_settings import ManagerSettings
from keepstep.script_checks.script_checker import ScriptChecker
from keepstep.step.catching_up.catch_up import CatchUp
from keepstep.step.catching_up.join_choice import NO_OPTIMIZER, JoinFacts, obstacle
from keepstep.step.context import StepContext

REFUSED = "Optimizer(catch_up=False)"


class Joining:
    """Makes the ``Follower`` of the context, if this group may catch up.

    Args:
        settings: of the Manager.
        context: what all attempts share.
        checker: knows what the script trains.
        may_read: returns whether the script may read the weights now, because no step is open.
    """

    def __init__(
        self,
        settings: ManagerSettings,
        context: StepContext,
        checker: ScriptChecker,
        may_read: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._context = context
        self._checker = checker
        self._may_read = may_read
        self._optimizers: tuple[str, ...] = ()
        """Class of each optimizer that was added, with its module."""
        self._why_not = ""
        """Why this group heals, as far as its optimizers decide it."""
        self._told = False

    def heal(self) -> None:
        """Let this group heal. ``Optimizer(catch_up=False)`` calls it."""
        self._refuse(REFUSED)
        self._context.compared.add(FixedLines(["optimizer does not catch up"]))

    def follow_with(self, optimizer: Optimizer, memory: int | None) -> CatchUp:
        """Let this group catch up. ``Optimizer(catch_up=True)`` calls it.

        Args:
            optimizer: replays the steps of the others; the only one of the script.
            memory: limit of the kept gradients, in bytes; None: see ``Optimizer``.

        Raises:
            ValueError: the Manager was built with settings that do not allow it, or has another such optimizer.
        """
        context = self._context
        if context.follower is not None:
            raise ValueError("this Manager has an Optimizer that catches up already; give it to one optimizer only")
        if not getattr(context.transport, "receives_in_background", False):
            raise ValueError(
                f"catch_up=True does not work with {type(context.transport).__name__}, which receives within a step; "
                f"use RelayTransport (the default) or HTTPTransport"
            )
        if context.asks.min_groups:
            raise ValueError("catch_up=True does not work with groups that train while a quorum forms; remove one")
        context.follower = follower = CatchUp(context, optimizer, memory)
        context.compared.add(FixedLines(["optimizer catches up"]))
        return follower

    def follow_if_possible(self, wrapper: str, optimizer: Optimizer, memory: int | None) -> CatchUp | None:
        """Let this group catch up if ``join_choice`` allows it, and heal otherwise. ``Optimizer`` calls it.

        Args:
            wrapper: class of the ``keepstep.Optimizer``.
            optimizer, memory: as of ``follow_with``.

        Returns:
            None: this group heals.
        """
        context = self._context
        if context.follower is not None and not context.follower.automatic:
            return None
        self._add(wrapper, optimizer)
        if self._why_not:
            self._refuse(self._why_not)
            return None
        follower = CatchUp(context, optimizer, memory, automatic=True, may_read=self._may_read)
        context.follower = follower
        return follower

    def _add(self, wrapper: str, optimizer: Optimizer) -> None:
        kind, transport, self._told = type(optimizer), self._context.transport, False
        self._optimizers += (f"{kind.__module__}.{kind.__qualname__}",)
        self._why_not = self._why_not or obstacle(
            JoinFacts(
                ranks=self._context.settings.world_size,
                asynchronous=self._settings.use_async_quorum,
                background=getattr(transport, "receives_in_background", False),
                transport=type(transport).__name__,
                trains_on=bool(self._context.asks.min_groups),
                optimizers=self._optimizers,
                wrapper=wrapper,
            )
        )

    def _refuse(self, why: str) -> None:
        self._why_not, self._told = why, False
        follower = self._context.follower
        if isinstance(follower, CatchUp) and follower.automatic:
            follower.refuse(why)
            self._context.follower = None  # it holds the state of its optimizer

    def tell(self) -> None:
        """Say once, in the log and to the lighthouse, whether this group catches up, and why not. Between two steps."""
        if self._told:
            return
        self._told = True
        context, follower = self._context, self._context.follower
        if isinstance(follower, CatchUp):
            why_not = follower.measure(self._checker.trained()) if follower.automatic else ""
        else:
            why_not = self._why_not or NO_OPTIMIZER
        context.link.joins = joins = f"heals: {why_not}" if why_not else "catches up"
        context.log.info("how this group joins a job that trains", joins=joins)
