"""The shell of LocalSGD and DiLoCo: count the steps of the inner optimizer, begin and end outer steps.

Each outer step is a step of the Manager. Groups meet at its quorum, so those that are behind heal there. A process that
has no state of the job yet requests the quorum at the first use in the block, before it trains: it gets the position in
the period together with the weights. Not when it enters the block: the functions that save and load the script's state
may need the name that ``with ... as`` binds after that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from keepstep.local_sgd.local_tensors import local_tensor
from keepstep.local_sgd.schedule import Schedule
from keepstep.optim import OptimizerWrapper
from keepstep.state.values.first_optimizer_state import count_from_zero, creating_state
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.text import listed

if TYPE_CHECKING:
    from types import TracebackType

    from keepstep.manager import Manager

log = get_logger("keepstep.local_sgd")

MAX_NAMED = 3
"""Parameters that an error names."""


class OuterSteps(ABC):
    """A block in which the groups train on their own between outer steps.

    Args:
        manager: of this replica group.
        optimizer: the inner optimizer, whose steps are counted.
        parameters: that the groups synchronize.
        schedule: when outer steps begin and end.
        compared: the registered states that are equal in all groups between two steps.
    """

    def __init__(
        self,
        manager: Manager,
        optimizer: Optimizer,
        parameters: Iterable[nn.Parameter],
        schedule: Schedule,
        compared: frozenset[str],
    ) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            raise TypeError(
                "the inner optimizer is a keepstep.Optimizer, which averages and commits in every step: pass the "
                "optimizer inside it"
            )
        if not hasattr(optimizer, "_optimizer_step_post_hooks"):
            raise TypeError(
                f"the inner optimizer is a {type(optimizer).__name__} without the hooks of torch.optim.Optimizer, so "
                f"that its steps cannot be counted: pass the optimizer inside it (of Accelerate: optimizer.optimizer)"
            )
        if manager.retry_allreduce:
            raise ValueError(
                f"{type(self).__name__} cannot retry a step: it averages more than the gradients of one batch; make "
                f"the Manager without retry_allreduce"
            )
        self._manager = manager
        self._optimizer = optimizer
        self._parameters = list(parameters)
        self._forms = {id(one): _form(one) for one in self._parameters}
        self._schedule = schedule
        self._sources: list[dict[str, Any]] = []
        """States that this group loaded in the current quorum."""
        self._hooks: list[RemovableHandle] = []
        self._forward_hook: RemovableHandle | None = None
        """Until the first use in the block."""
        self._joined = self._leave_out = False
        manager.register_state_dict_fn(type(self).__name__, self._load, self._save)
        manager.compare_only(compared)

    @abstractmethod
    def _start(self, fragment: int) -> None:
        """Start the collectives of an outer step."""

    @abstractmethod
    def _finish(self, fragment: int) -> bool:
        """Wait for the collectives, and end the step of the Manager. Return whether it committed."""

    @abstractmethod
    def _abandon(self, fragment: int) -> None:
        """Forget the collectives."""

    def __enter__(self) -> Self:
        self._refuse_in_rehearsal()
        if self._hooks:
            raise RuntimeError(f"this {type(self).__name__} is entered already; leave its block first")
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._before_inner_step),
            self._optimizer.register_step_post_hook(self._after_inner_step),
        ]
        if not self._joined:
            self._await_first_use()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop counting. An outer step that has begun ends now, unless an exception leaves the block."""
        self._unhook()
        fragment = self._schedule.in_flight
        if fragment is not None and error is None:
            self._end(fragment)
        elif fragment is not None:
            self._abandon(fragment)
            self._schedule.abandon()

    def _unhook(self) -> None:
        self._end_first_use()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def begin(self) -> None:
        """Heal now, if this process has no state of the job yet, and not in the first forward pass of the block.

        Call it first in the block, in all ranks, if the loop needs the state before that pass, or if a rank enters that
        pass only after another one has left it, as the stages of a pipeline do.
        """
        if self._forward_hook is None:
            return
        self._refuse_in_rehearsal()
        self._end_first_use()  # a function that loads the state may use the model
        try:
            with torch.inference_mode(mode=False):  # the first use may be an evaluation
                self._join()
        except BaseException:
            self._await_first_use()
            raise

    def _refuse_in_rehearsal(self) -> None:
        if self._manager.steps.rehearsing:
            raise RuntimeError(f"{type(self).__name__} in rehearse(), which cannot undo its steps; enter it afterwards")

    def _await_first_use(self) -> None:
        """Begin in the next forward pass.

        The hook sees all modules: the model around the fragments is not known, and FSDP gathers weights in its hooks.
        """
        self._forward_hook = register_module_forward_pre_hook(self._before_forward)

    def _end_first_use(self) -> None:
        if self._forward_hook is not None:
            self._forward_hook.remove()
            self._forward_hook = None

    def _before_forward(self, module: nn.Module, _arguments: object) -> None:
        if not torch.compiler.is_compiling() and any(id(one) in self._forms for one in module.parameters()):
            self.begin()

    def _before_inner_step(self, *_: object) -> None:
        if creating_state():
            return
        self.begin()  # if no hook saw a forward pass, as in a compiled function
        if self._leave_out:
            self._leave_out = False
            self._drop_gradients()

    def _drop_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def _join(self) -> None:
        """Heal before the first inner step, if this process has no state of the job yet."""
        if self._joined or self._manager.current_step() or not self._manager.init_sync:
            return
        self._start_quorum()
        self._joined = True
        if self._manager.is_healing():
            self._schedule.skip_to_begin()  # the others average now, and this group heals when they end
        if self._schedule.begins:
            self._advance()
            self._leave_out = not self._schedule.position  # else it trains a step more than a loop asks for
        else:
            self._manager.steps.cancel()  # the first outer step has a quorum of its own, with groups that start later
        if self._sources:
            self._drop_gradients()  # of weights that this group has no more

    def _after_inner_step(self, *_: object) -> None:
        if creating_state():
            count_from_zero(self._optimizer)
            return
        found_inf = getattr(self._optimizer, "found_inf", None)  # set by a GradScaler while a fused optimizer steps
        if found_inf is not None and found_inf.item():
            return
        self._count_step()
        self._advance()
        self._manager.steps.leave_if_asked()  # the next outer step may be minutes away

    def _count_step(self) -> None:
        self._schedule.count()

    def _advance(self) -> None:
        if self._schedule.begins:
            self._begin()
        if self._schedule.ends and self._schedule.in_flight is not None:
            self._end(self._schedule.in_flight)

    def _begin(self) -> None:
        self._start_quorum()
        if self._schedule.begins:
            self._start(self._schedule.begin(self._manager.current_step()))
        else:
            self._manager.steps.cancel()  # this group has healed from one that is earlier in its period

    def _end(self, fragment: int) -> bool:
        try:
            return self._finish(fragment)
        finally:
            self._schedule.end()

    def _start_quorum(self) -> None:
        """Begin a step of the Manager. In a synchronous quorum this group heals here, if it is behind.

        KeepstepError: the inner optimizer trains parameters that this class does not synchronize.
        """
        trained = [one for group in self._optimizer.param_groups for one in group["params"]]
        if other := [one for one in trained if self._forms.get(id(one)) != _form(one)]:
            raise KeepstepError(
                f"{len(other)} parameters of the inner optimizer ({listed(list(map(_named, other)), MAX_NAMED)}) were "
                f"added, replaced or cast after {type(self).__name__} was made, so the groups would not average them: "
                f"give the optimizer all parameters that train at any time before; frozen ones may train later"
            )
        self._sources.clear()
        self._manager.start_quorum()
        if self._sources:
            self._check_healed(self._sources[-1])

    def _check_healed(self, source: dict[str, Any]) -> None:
        """Raise if the parameters of the model did not heal: they would be averaged as they are."""
        if not torch.equal(_bits(self._sample()), _bits(source["sample"])):
            raise KeepstepError(
                "this group healed, but its parameters differ from those of its source: return the state_dict() of "
                "the model in the Manager's state_dict, and load it in load_state_dict"
            )
        if source["inner_states"] and not self._optimizer.state:
            log.warning(
                "the inner optimizer did not heal",
                reason="it has no state after the heal, and that of the source has",
                remedy="return its state_dict() in the Manager's state_dict, and load it in load_state_dict",
            )

    def _sample(self) -> torch.Tensor:
        """Return the first element of each parameter."""
        first = [local_tensor(one)[(0,) * one.dim()] for one in self._parameters if local_tensor(one).numel()]
        parts = [torch.view_as_real(one)[0] if one.is_complex() else one for one in first]
        return torch.tensor([part.item() for part in parts], dtype=torch.float64)

    def _position(self) -> dict[str, Any]:
        return {"position": self._schedule.position}

    def _save(self) -> dict[str, Any]:
        return {**self._position(), "sample": self._sample(), "inner_states": len(self._optimizer.state)}

    def _load(self, state: dict[str, Any]) -> None:
        self._load_position(state)
        self._sources.append(state)

    def _load_position(self, state: dict[str, Any]) -> None:
        self._schedule.position = int(state["position"])


def _form(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.shape, parameter.dtype


def _named(parameter: torch.Tensor) -> str:
    return f"{tuple(parameter.shape)} {parameter.dtype}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as integers, so that a NaN equals itself."""
    return tensor.view(torch.int64)
