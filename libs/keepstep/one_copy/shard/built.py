"""The objects that build() returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from keepstep_mesh.errors import KeepstepError


@runtime_checkable
class Stateful(Protocol):
    """An object with a state."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Take a state over."""
        ...


@dataclass(frozen=True)
class Built:
    """The model and the optimizer of this rank, and what else ``build`` returned."""

    objects: tuple[Any, ...]
    """As ``build`` returned them."""
    model: nn.Module
    optimizer: Optimizer
    schedulers: tuple[LRScheduler, ...]

    @classmethod
    def of(cls, returned: object) -> Built:
        """Sort what ``build`` returned. KeepstepError: not one model and one optimizer."""
        objects: Sequence[Any] = returned if isinstance(returned, Sequence) else (returned,)
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        if len(models) != 1 or len(optimizers) != 1:
            kinds = ", ".join(type(one).__name__ for one in objects)
            raise KeepstepError(
                f"build() returned {kinds}; it must return one module and one optimizer, and may return schedulers "
                f"and other objects with a state_dict after them; put several modules into one nn.ModuleList"
            )
        schedulers = tuple(one for one in objects if isinstance(one, LRScheduler))
        return cls(tuple(objects), models[0], optimizers[0], schedulers)

    def others(self) -> dict[str, Stateful]:
        """Return the objects beside the model and the optimizer that have a state."""
        rest = [one for one in self.objects if one is not self.model and one is not self.optimizer]
        return {f"build {index}": one for index, one in enumerate(rest) if isinstance(one, Stateful)}


def end_broken_pass(model: nn.Module) -> bool:
    """Drop what a broken pass has left: gathered parameters, collectives in flight, and gradients.

    Args:
        model: its parameters keep their values.

    Returns:
        Whether the model is usable. If not, build another one and load the parameters: torch before 2.13 has no public
        way to end a pass of FSDP2, and an open collective may raise once more.
    """
    roots: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and not any(name.startswith(f"{root}.") or not root for root, _ in roots):
            roots.append((name, module))
    for _, root in roots:
        if getattr(root._get_fsdp_state(), "_is_root", True) is None:  # noqa: SLF001  torch has no public way to ask
            continue  # no pass of it has begun, and reset_iter_state refuses it
        reset = getattr(root, "reset_iter_state", None)
        if reset is None:
            return False
        try:
            reset()
        except Exception:  # noqa: BLE001  the collective that it waits for has failed; the caller builds the model again
            return False
    for parameter in model.parameters():
        parameter.grad = None
    return all(_drop_accumulated(one) for one in model.modules() if isinstance(one, FSDPModule))


def _drop_accumulated(module: Any) -> bool:
    """Drop gradients of whole parameters, of passes without ``set_requires_gradient_sync``.

    ``reset_iter_state`` of torch 2.13 says that it drops them, and keeps them. Return whether they could be dropped.
    """
    try:
        for group in module._get_fsdp_state()._fsdp_param_groups:  # noqa: SLF001  torch has no public way
            for one in group.fsdp_params:
                one.unsharded_accumulated_grad = None
                if hasattr(one, "_unsharded_param"):
                    one._unsharded_param.grad = None  # noqa: SLF001
    except AttributeError:
        return False
    return True
