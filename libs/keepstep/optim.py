"""An optimizer that steps only if the quorum commits the step."""

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

# later versions of torch will not pass it; `step` raises then
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


class OptimizerWrapper(Optimizer):
    """Begins a step of the Manager in ``zero_grad`` and commits it in ``step``.

    With a ``GradScaler``, register its state with the Manager, so that it heals too. The averaged gradients are
    unscaled after the commit, by the scale that the group has after a heal: every group finds the same infinities and
    skips the same updates. A step that does not commit leaves the scale unchanged.

    Args:
        manager: of this replica group.
        optim: the optimizer that changes the parameters.
    """

    _step_supports_amp_scaling = True
    """Tells ``GradScaler`` to pass itself to ``step``, which unscales the gradients."""

    def __init__(self, manager: Manager, optim: Optimizer) -> None:
        self.manager = manager
        self.optim = optim
        manager.script_checker.add_optimizer(optim)

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
        """Begin a step (``Manager.start_quorum``), and clear the gradients.

        Args:
            set_to_none: as in ``torch.optim.Optimizer.zero_grad``.
        """
        self.manager.start_quorum()
        self.optim.zero_grad(set_to_none)

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> bool:
        """Step the optimizer if the step commits.

        Args:
            closure: not supported: it would run the model outside of the step.
            grad_scaler: given by ``GradScaler.step``, which passes itself.

        Returns:
            Whether the optimizer stepped. Step schedulers and counters only then. False also after a step whose
            gradients overflowed: it commits in all groups, and changes no weight.

        Raises:
            ValueError: a closure was given, or a GradScaler to a Manager with ``refuse_nonfinite``.
            Exception: as ``Manager.should_commit``, and as the optimizer.
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
        with changing_weights(self.manager):
            self.optim.step()
        return True

    def _step_scaled(self, scaler: GradScaler) -> bool:
        if self.manager.refuse_nonfinite:
            raise ValueError(
                "a GradScaler needs steps with infinities, to lower its scale, and Manager(refuse_nonfinite=True) "
                "refuses them: use one of the two"
            )
        seen = scaler._per_optimizer_states[id(self)]  # noqa: SLF001  as other optimizers that take the scaler
        unscaled_by = scaler.get_scale() if seen["stage"] is OptState.UNSCALED else None
        self.manager.expect_overflow()
        committed = self.manager.should_commit()
        if committed and unscaled_by not in (None, scaler.get_scale()):
            # the script used the unscaled gradients already, to clip them for example
            log.info("scale changed by a heal after unscale_; the group heals again", scale=unscaled_by)
            self.manager.mark_torn()
            committed = False
        if not committed:
            _skip_next_update(scaler)
            return False
        with changing_weights(self.manager):
            if unscaled_by is None:
                scaler.unscale_(self)
            if any(found_inf.item() for found_inf in seen["found_inf_per_device"].values()):
                return False
            self.optim.step()
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"


@contextlib.contextmanager
def changing_weights(manager: Manager) -> Iterator[None]:
    """Change the weights of a committed step. After an error in the block they are torn."""
    manager.disallow_state_dict_read()
    try:
        yield
    except BaseException:
        manager.mark_torn()  # the step is committed and incomplete: no other group has these weights
        raise
    finally:
        manager.allow_state_dict_read()


def _skip_next_update(scaler: GradScaler) -> None:
    """Let the next ``update`` of ``scaler`` keep the scale: no other group counts the overflow of a discarded step."""

    def update(new_scale: object = None) -> None:  # noqa: ARG001
        del scaler.update
        scaler._per_optimizer_states.clear()  # noqa: SLF001

    scaler.update = update  # type: ignore[method-assign]
