"""An optimizer whose step counts only if the quorum commits it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from keepstep.manager import Manager


class OptimizerWrapper(Optimizer):
    """Begins the step in ``zero_grad`` and commits it in ``step``.

    Args:
        manager: whose steps these are.
        optim: the optimizer that changes the parameters.

    With a ``GradScaler``: gradients are averaged before ``unscale_`` looks at them, so every group finds the same
    infinities and skips the same steps. Register the scaler's state with the Manager, so that a healed group scales
    alike.
    """

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

    def step(self, closure: Callable[[], float] | None = None) -> bool:  # type: ignore[override]
        """Steps the optimizer if the step commits.

        Args:
            closure: None; an optimizer that runs the model again would leave the step: ValueError.

        Returns:
            Whether it stepped. Gate schedulers and counters with it.
        """
        if closure is not None:
            raise ValueError("a closure would run the model outside of the step; use an optimizer that needs none")
        if not self.manager.should_commit():
            return False
        self.manager.disallow_state_dict_read()
        try:
            self.optim.step()
        except BaseException:
            self.manager.mark_torn()  # committed, but not made: these weights are nobody else's
            raise
        finally:
            self.manager.allow_state_dict_read()
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
