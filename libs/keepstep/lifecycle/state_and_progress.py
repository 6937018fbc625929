"""The part of a Manager that lasts from step to step: the registered state and the progress of the group."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from torch.optim import Optimizer

from keepstep.checkpoint.managed.durable_writer import LastCheckpoint
from keepstep.group.agreement import FixedLines, LayoutPart
from keepstep.lifecycle.durability import Durability
from keepstep.step.catching_up.catch_up import CatchUp
from keepstep.step.context import StepContext
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.messages import ServiceAddress

T = TypeVar("T")


class StateAndProgress:
    """State that heals and is compared, and how far the group is. The ``Manager`` derives from it."""

    _context: StepContext
    """Of all steps of the group."""
    _durability: Durability
    """Of its durable checkpoints."""
    _rehearsing = False

    @property
    def rehearsing(self) -> bool:
        """Whether this process is in ``rehearse``."""
        return self._rehearsing

    def _refuse_in_rehearsal(self, call: str) -> None:
        if self.rehearsing:
            raise RuntimeError(f"{call} in rehearse(), which undoes what happens in it; call it outside")

    @property
    def retry_allreduce(self) -> bool:
        """Whether the other groups repeat a step in which a member is lost, with the same gradients."""
        return self._context.kept is not None

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

    def add_layout(self, lines: list[str] | LayoutPart) -> None:
        """Add to the layout that all groups must have in common. Each DDP adds the layout of its module.

        A group whose lines differ from the job's, also in their order, is refused with the first difference. All groups
        may add lines between two steps, in the same step.

        Args:
            lines: one for each parameter or bucket; or a part whose lines may change between two steps.
        """
        self._context.add_layout(FixedLines(lines) if isinstance(lines, list) else lines)

    def state_dict(self) -> dict[str, Any]:
        """Return the Manager's part of the user's own checkpoint.

        Returns:
            ``step``, ``batches_committed`` and, after the first commit, ``lineage``.

        Raises:
            KeepstepError: this group catches up, and its weights are not those of ``current_step()``.
        """
        self._refuse_while_catching_up("state_dict()")
        self._check_change()
        return self._context.progress.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resume from the user's own checkpoint.

        Once groups that resumed have committed a step, a group that was away since before the resume heals from them,
        even when its step is higher.

        Args:
            state_dict: what ``state_dict`` returned. One of torchft, which has no lineage, works too.
        """
        self._refuse_in_rehearsal("load_state_dict()")
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
            KeepstepError: this group catches up.
        """
        self._refuse_while_catching_up("save_checkpoint()")
        self._check_change()
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
        self._refuse_in_rehearsal("resume()")
        return self._durability.resume()

    def resume_if_set(self) -> None:
        """Call ``resume`` if ``durable_every`` or ``resume=True`` say so, as the first ``start_quorum`` does."""
        if not self.rehearsing:
            self._durability.resume_if_set()

    @property
    def catching_up(self) -> bool:
        """Whether this group takes part without weights, while the state of the others arrives.

        Only with ``Optimizer(catch_up=True)``. Until it is False, save, evaluate and export nothing: the weights are
        not those of ``current_step()``. It changes in ``Optimizer.step`` and in ``finish``.
        """
        return self._context.progress.following

    def _refuse_while_catching_up(self, call: str) -> None:
        if self.catching_up:
            raise KeepstepError(
                f"{call} at step {self.current_step()}: this group catches up, and its weights are older than that; "
                f"save only while manager.catching_up is False"
            )

    def follow_with(
        self, optimizer: Optimizer, after_commit: Sequence[Callable[[], object]], memory: int | None
    ) -> CatchUp:
        """Let this group catch up when it joins, instead of making the others wait. ``Optimizer`` calls it.

        Args:
            optimizer: replays the steps of the others; the only one of the script.
            after_commit: called after each of its steps.
            memory: limit of the kept gradients, in bytes; None: see ``Optimizer``.

        Raises:
            ValueError: the Manager was built with settings that do not allow it, or has another such optimizer.
        """
        context = self._context
        if context.follower is not None:
            raise ValueError("this Manager has an Optimizer with catch_up=True already; give it to one optimizer only")
        if not getattr(context.transport, "receives_in_background", False):
            raise ValueError(
                f"catch_up=True does not work with {type(context.transport).__name__}, which receives within a step; "
                f"use RelayTransport (the default) or HTTPTransport"
            )
        if self.retry_allreduce:
            raise ValueError(
                "catch_up=True does not work with retry_allreduce=True (KEEPSTEP_RETRY_ALLREDUCE=1): a step that is "
                "repeated may not be the one that a group follows; use one of them"
            )
        if context.min_groups:
            raise ValueError("catch_up=True does not work with groups that train while a quorum forms; remove one")
        follower = CatchUp(context, optimizer, after_commit, memory)
        context.follower = follower
        self.add_layout(["optimizer catches up"])
        return follower

    def change_begins(self) -> None:
        """Note that the weights begin to change. Unless ``change_ended`` follows, the state is torn.

        ``Optimizer`` calls both around each step of its inner optimizer.
        """
        self._context.changing = self._context.requests > 0  # before the first step the weights are the script's own

    def change_ended(self) -> None:
        """Note that the change of the weights is complete."""
        self._context.changing = False

    def _check_change(self) -> None:
        """Mark the state as torn if the last change of the weights failed."""
        context = self._context
        if context.changing:
            context.changing = False
            if not context.progress.torn:
                context.log.error("an optimizer failed in the middle of its step", step=context.progress.step)
                context.tear()

    def mark_torn(self) -> None:
        """Mark this group's state as torn, because an optimizer failed in the middle of a step for example.

        The group heals from another one at the next step, and no group heals from it until then.
        """
        self._context.tear()

    @property
    def leaving(self) -> bool:
        """Whether this group was asked to leave, by SIGTERM or a drain: the next ``start_quorum`` raises Drained."""
        return bool(self._context.leaving)

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
        if not self.rehearsing:
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
