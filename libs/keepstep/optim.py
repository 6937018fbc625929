"""An optimizer whose step counts only if the quorum commits it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.amp.grad_scaler import GradScaler, OptState
from torch.optim import Optimizer

from keepstep_mesh.config.logging import get_logger

if TYPE_CHECKING:
    from keepstep.manager import Manager

log = get_logger("keepstep.optim")

# it will not pass itself for ever; the day that it does not, `step` says so
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


class OptimizerWrapper(Optimizer):
    """Begins the step in ``zero_grad`` and commits it in ``step``.

    Args:
        manager: whose steps these are.
        optim: the optimizer that changes the parameters.

    With a ``GradScaler``, whose state must heal too (register it with the Manager): the averaged gradients are unscaled
    after the commit, by the scale that a heal has brought, so that every group finds the same infinities and skips the
    same updates. A step that does not commit leaves the scale as it is.
    """

    _step_supports_amp_scaling = True
    """To ``GradScaler``: ``step`` takes it, and unscales by itself, whatever the inner optimizer can do."""

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        self.manager = manager
        self.optim = optim

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optim"], name)

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
        """Begins a step (``Manager.start_quorum``) and clears the gradients."""
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> bool:
        """Steps the optimizer if the step commits.

        Args:
            closure: None; an optimizer that runs the model again would leave the step: ValueError.
            grad_scaler: for ``GradScaler.step``, which passes itself.

        Returns:
            Whether it stepped. Gate schedulers and counters with it. A step whose gradients overflowed commits in all
            groups, and changes no weight in any: False.
        """
        if closure is not None:
            raise ValueError("a closure would run the model outside of the step; use an optimizer that needs none")
        if "found_inf" in vars(self):
            raise RuntimeError(
                "this torch's GradScaler does not pass itself to step(), so that its gradients cannot be unscaled "
                "alike in all groups; use torch 2.13 or earlier"
            )
        if grad_scaler is not None:
            return self._step_scaled(grad_scaler)
        if not self.manager.should_commit():
            return False
        with self._changing_weights():
            self.optim.step()
        return True

    def _step_scaled(self, scaler: GradScaler) -> bool:
        seen = scaler._per_optimizer_states[id(self)]  # noqa: SLF001  a step that takes the scaler reads what it keeps
        unscaled_by = scaler.get_scale() if seen["stage"] is OptState.UNSCALED else None
        committed = self.manager.should_commit()
        if committed and unscaled_by not in (None, scaler.get_scale()):
            # clipping and the like came between: it cannot be done again by the right scale
            log.info("healed after unscale_ with another scale: heals again", scale=unscaled_by)
            self.manager.mark_torn()
            committed = False
        if not committed:
            _let_update_change_nothing(scaler)
            return False
        with self._changing_weights():
            if unscaled_by is None:
                scaler.unscale_(self)
            if any(found_inf.item() for found_inf in seen["found_inf_per_device"].values()):
                return False
            self.optim.step()
        return True

    @contextlib.contextmanager
    def _changing_weights(self) -> Iterator[None]:
        self.manager.disallow_state_dict_read()
        try:
            yield
        except BaseException:
            self.manager.mark_torn()  # committed, but not made: these weights are nobody else's
            raise
        finally:
            self.manager.allow_state_dict_read()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"


def _let_update_change_nothing(scaler: GradScaler) -> None:
    """What a discarded step found is in no other group's scale: its ``update`` only makes ready for the next step."""

    def update(new_scale: object = None) -> None:  # noqa: ARG001
        del scaler.update
        scaler._per_optimizer_states.clear()  # noqa: SLF001

    scaler.update = update  # type: ignore[method-assign]
