"""Whether this group catches up when it is behind, if the script leaves it to keepstep: facts for ``join_choice``.

And whether the script reads the weights while the group catches up, to evaluate or save them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from keepstep.runtime.host_memory import available_bytes, ranks_of_host
from keepstep.state.values.tensors_in_containers import tensors_in
from keepstep.step.catching_up.join_choice import MOMENTS, size_obstacle
from keepstep.step.live_state import LiveState

OWN_HOOKS = 1
"""Of ``keepstep.Optimizer``, before a step of the optimizer, and after it."""


class OwnChoice:
    """The choice of one group.

    Args:
        state: registered, which a joiner receives.
        optimizer: takes the steps.
    """

    def __init__(self, state: LiveState, optimizer: Optimizer) -> None:
        self._state = state
        self._optimizer = optimizer
        self._fits = False

    @property
    def allows(self) -> bool:
        """Whether this group may catch up now. From any thread."""
        optimizer: Any = self._optimizer
        before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks  # noqa: SLF001
        hooked = max(len(before), len(after)) > OWN_HOOKS  # those of the script may do anything
        return self._fits and not hooked

    def measure(self) -> str:
        """Compare the size of the state with the memory. Return why this group heals; empty: it may catch up.

        Between two steps.
        """
        optimizer = self._optimizer
        try:
            held = sum(one.numel() * one.element_size() for one in tensors_in(self._state.user_state()))
        except Exception as error:  # noqa: BLE001  a heal reports it if it matters
            return f"its state cannot be read: {type(error).__name__}: {error}"
        if not optimizer.state:  # as in a process that has just started
            kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
            parameters = (one for group in optimizer.param_groups for one in group["params"])
            held += MOMENTS.get(kind, 0) * sum(one.numel() * one.element_size() for one in parameters)
        why_not = size_obstacle(held, available_bytes() // ranks_of_host())
        self._fits = not why_not
        return why_not


class WeightReads:
    """Calls ``on_read`` when one of the watched modules or optimizers is used. ``on_read`` takes what was called."""

    def __init__(self, on_read: Callable[[str], None]) -> None:
        self._on_read = on_read
        self._hooks: list[RemovableHandle] = []

    def watch(self, trained: Iterable[nn.Module | Optimizer]) -> None:
        """Watch the forward pass and ``state_dict`` of modules, and ``state_dict`` of optimizers, until ``end``."""
        for one in trained:
            name = type(one).__name__
            self._hooks.append(one.register_state_dict_pre_hook(self._noting(f"{name}.state_dict()")))
            if isinstance(one, nn.Module):
                self._hooks.append(one.register_forward_pre_hook(self._noting(f"a forward pass of {name}")))

    def _noting(self, call: str) -> Callable[..., None]:
        def note(*_: Any) -> None:
            self._on_read(call)

        return note

    def end(self) -> None:
        """Watch no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
