"""An optimizer that steps only if the quorum commits the step."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from keepstep.lifecycle.manager_like import as_manager
from keepstep.state.values.first_optimizer_state import count_from_zero, creating_state
from keepstep_mesh.config.logging import get_logger

if TYPE_CHECKING:
    from keepstep.manager import Manager
    from keepstep.step.catching_up.catch_up import CatchUp

log = get_logger("keepstep.optim")

# later versions of torch will not pass it; `step` raises then
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


class OptimizerWrapper(Optimizer):
    """Begins a step of the Manager in ``zero_grad`` and commits it in ``step``.

    With a ``GradScaler``, register its state with the Manager, so that it heals too. The averaged gradients are
    unscaled after the commit, by the scale that the group has after a heal: every group finds the same infinities and
    skips the same updates. A step that does not commit leaves the scale unchanged. A script that calls ``unscale_``
    heals when it joins.

    A group that *catches up* does not let the others wait when it joins. It takes part in their steps with zeros, and
    keeps the averaged gradients, while their state arrives in the background; then it takes the same steps of the
    optimizer on them, and takes over what differs from the others (docs/catching-up.md). Until then ``step`` returns
    False. By default a group catches up if its state is large, and one optimizer of torch takes all steps.

    With ``catch_up=True`` the script says that the same steps give the same weights, and nothing is taken over at the
    end. Requirements: ``optim`` is the only optimizer that changes the weights; what the script does to gradients
    before ``step``, such as clipping, depends on nothing but them; everything else that changes after a commit is in
    ``after_commit``, and its state is registered.

    Args:
        manager: of this replica group.
        optim: the optimizer that changes the parameters.
        catch_up: None: as keepstep decides, see above. True: always. False: heal. Equal in all groups. It needs memory
            for ``catch_up_memory`` and one more copy of the state while the group joins, and True needs
            ``use_async_quorum=True``.
        after_commit: functions that are called in their order after each step of the optimizer, such as
            ``[scheduler.step]``.
        catch_up_memory: limit of the gradients that are kept, in bytes. Beyond it the others wait until the state is
            here. None: the size of the state with ``catch_up=True``, twice that without, 256 MiB at least.

    Raises:
        ValueError: ``catch_up`` does not fit the Manager, or ``catch_up_memory`` is less than 1.
    """

    _step_supports_amp_scaling = True
    """Tells ``GradScaler`` to pass itself to ``step``, which unscales the gradients."""

    def __init__(
        self,
        manager: Manager,
        optim: Optimizer,
        *,
        catch_up: bool | None = None,
        after_commit: Sequence[Callable[[], object]] = (),
        catch_up_memory: int | None = None,
    ) -> None:
        self.manager = manager
        self._manager = manager = as_manager(manager)
        self.optim = optim
        self._after_commit = tuple(after_commit)
        if catch_up_memory is not None and catch_up_memory < 1:
            raise ValueError(f"catch_up_memory={catch_up_memory} must be at least 1 byte")
        if catch_up and not manager.use_async_quorum:
            raise ValueError(
                "catch_up=True needs Manager(use_async_quorum=True): in a synchronous quorum all groups heal"
            )
        self._follower = self._join(catch_up, catch_up_memory)
        manager.script_checker.add_optimizer(optim)
        if (refresh := getattr(optim, "init_cache_state_dict", None)) is not None:
            manager.steps.read_after(refresh)  # torchtitan's container returns a state with earlier learning rates
        with contextlib.suppress(AttributeError):  # a wrapper of another optimizer, such as Accelerate's, has no hooks
            optim.register_step_pre_hook(self._inner_step_begins)
            optim.register_step_post_hook(self._inner_step_ended)

    def _join(self, catch_up: bool | None, memory: int | None) -> CatchUp | None:
        joining, own = self._manager.steps.joining, (self.optim, memory)
        if catch_up:
            return joining.follow_with(*own)
        if catch_up is None:
            return joining.follow_if_possible(type(self).__name__, *own)
        joining.heal()
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, because it belongs to a Manager: copy the "
            f"optimizer inside it (optimizer.optim), or save its state_dict()"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optim.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optim.add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optim.load_state_dict(state_dict)

    def state_dict(self) -> dict[str, Any]:
        return self.optim.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step (``Manager.start_quorum``), and clear the gradients.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.
        """
        if not creating_state():
            self._manager.steps.begin_with(self._manager.script_checker.common.turn_of(self.optim))
            self._manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> bool:
        """Step the optimizer if the step commits.

        Args:
            closure: not supported: it would run the model outside of the step.
            grad_scaler: given by ``GradScaler.step``, which passes itself.

        Returns:
            Whether the optimizer stepped. Step schedulers and counters only then, or in ``after_commit``. False also
            after a step whose gradients overflowed, which commits in all groups and changes no weight, and while this
            group catches up.

        Raises:
            ValueError: a closure was given, or a GradScaler to a Manager with ``refuse_nonfinite``.
            Exception: as ``Manager.should_commit``, and as the optimizer.
        """
        if creating_state():
            self.optim.step()
            return False
        if closure is not None:
            raise ValueError("a closure would run the model outside of the step; use an optimizer that needs none")
        if "found_inf" in vars(self):
            raise RuntimeError(
                "this torch's GradScaler does not pass itself to step(), so that its gradients cannot be unscaled "
                "alike in all groups; use torch 2.13 or earlier"
            )
        if grad_scaler is not None:
            return self._step_scaled(grad_scaler)
        with self._manager.committing() as committed:
            follows = self._follower is not None and self._follower.following
            if committed and not follows:
                self._step()
        if not committed:
            self._discarded()
            return False
        if self._follower is None:
            return True
        if follows:
            return self._follower.advance(self._step)
        self._follower.stepped()
        return True

    def _inner_step_begins(self, *_: object) -> None:
        if self._manager.steps.rehearsing or creating_state():
            return
        if self._manager.steps.open_number is None:
            self._manager.steps.change_begins()
        elif type(self.optim).step.__module__.startswith("torch.optim"):
            raise self._too_early()
        # another class may call `step` of this wrapper in its own, as torchtitan's container does

    def _inner_step_ended(self, *_: object) -> None:
        if creating_state():
            count_from_zero(self.optim)
            return
        if self._manager.steps.open_number is not None and not self._manager.steps.rehearsing:
            self._manager.mark_torn()
            raise self._too_early()
        self._manager.steps.change_ended()

    def _too_early(self) -> RuntimeError:
        name = type(self.optim).__name__
        return RuntimeError(
            f"{name}.step() was called before the step has committed, so that no step ever would: call step() of "
            f"the keepstep.Optimizer around it (GradScaler.step takes that one too), or step the {name} in `with "
            f"manager.committing()`"
        )

    def _discarded(self) -> None:
        if self._manager.steps.rehearsing:
            self.optim.step()  # undone at the end of the rehearsal

    def _step(self) -> None:
        self.optim.step()
        for act in self._after_commit:
            act()

    def _step_scaled(self, scaler: GradScaler) -> bool:
        if self._manager.refuse_nonfinite:
            raise ValueError(
                "a GradScaler needs steps with infinities, to lower its scale, and Manager(refuse_nonfinite=True) "
                "refuses them: use one of the two"
            )
        states = scaler._per_optimizer_states  # noqa: SLF001  as other optimizers that take the scaler
        if states.get(id(self.optim), {}).get("stage") is OptState.UNSCALED:
            raise RuntimeError(
                f"unscale_() was called with the {type(self.optim).__name__}, whose gradients step() would unscale "
                f"again: pass the keepstep.Optimizer around it to unscale_(), too"
            )
        seen = states[id(self)]
        unscaled_by, follower = scaler.get_scale() if seen["stage"] is OptState.UNSCALED else None, self._follower
        self._manager.steps.expect_overflow()
        if unscaled_by is not None:
            self._manager.steps.heal_instead("unscale_() divides gradients by the scale of this group")
        used = overflow = follows = False
        try:
            with self._manager.committing() as committed:
                follows = committed and follower is not None and follower.following
                used = committed and not follows and unscaled_by in (None, scaler.get_scale())
                if used:
                    if unscaled_by is None:
                        scaler.unscale_(self)
                    overflow = any(found_inf.item() for found_inf in seen["found_inf_per_device"].values())
                    if not overflow:
                        self._step()
                elif committed and not follows:  # the script has used the unscaled gradients, to clip them
                    log.info("scale changed by a heal after unscale_; the group heals again", scale=unscaled_by)
                    self._manager.mark_torn()
        except BaseException:
            if used and seen["found_inf_per_device"]:
                scaler.update()  # belongs to the step, and the script does not come to it
            scaler._per_optimizer_states.clear()  # noqa: SLF001  else the next gradients count as unscaled
            raise
        if follows and follower is not None:
            caught_up = follower.advance(lambda: self._replay_scaled(scaler))
            _skip_next_update(scaler)
            return caught_up
        if not used:
            self._discarded()
            _skip_next_update(scaler)
        return used and not overflow

    def _replay_scaled(self, scaler: GradScaler) -> None:
        """Take a step of the others on their gradients, and change the scale as they have."""
        states = scaler._per_optimizer_states  # noqa: SLF001
        states.clear()
        scaler.unscale_(self)
        if not any(found_inf.item() for found_inf in states[id(self)]["found_inf_per_device"].values()):
            self._step()
        type(scaler).update(scaler)  # not the one that `_skip_next_update` has set
        states.clear()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"


def _skip_next_update(scaler: GradScaler) -> None:
    """Let the next ``update`` of ``scaler`` keep the scale: no other group counts the overflow of a discarded step."""

    def update(new_scale: object = None) -> None:  # noqa: ARG001
        del scaler.update
        scaler._per_optimizer_states.clear()  # noqa: SLF001

    scaler.update = update  # type: ignore[method-assign]
