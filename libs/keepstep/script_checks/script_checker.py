"""Collect what a script does in its first steps, and warn of each mistake once."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from keepstep.group.agreement import Values, changes
from keepstep.script_checks import mistakes
from keepstep.script_checks.common_values import CommonValues
from keepstep.script_checks.mistakes import Mistake, OptimizerFacts, ParameterFacts
from keepstep.script_checks.state_coverage import StateCoverage, memory_of, sampled
from keepstep.state.values.sharding import is_dtensor
from keepstep.state.values.tensors_in_containers import tensors_in
from keepstep.step.live_state import LiveState
from keepstep_mesh.config.logging import Logger

OPTIMIZERS_CHECKED_AT = (2, 10)
"""Committed steps of this process after which the states of optimizers are checked. Before the first step of an
optimizer it has none, and a GradScaler may skip the first steps."""


class ScriptChecker:
    """The checks of one process. On the training thread.

    Args:
        state: the registered state.
        log: of the Manager.
        rank: of this process; rank 0 warns for the group.
        ranks: number of ranks of the group.
    """

    def __init__(self, state: LiveState, log: Logger, rank: int, ranks: int) -> None:
        self._state = state
        self._log = log
        self._rank, self._ranks = rank, ranks
        self.common = CommonValues()
        """Compares these modules and optimizers with those of other groups."""
        self._modules: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._trained: weakref.WeakSet[nn.Module | Optimizer] = weakref.WeakSet()
        """All of these, also after the check."""
        self._asked = False
        """Whether a quorum was requested."""
        self._last_step: int | None = None
        """Number of the last committed step."""
        self._ended_at: float | None = None
        """When it ended; None: the next quorum is requested."""
        self._pause = 0.0
        """Seconds between these two."""
        self._discarded_with: Values = ()
        """Values of the optimizers at the end of the last step, if it was discarded."""
        self._commits = 0
        self._parameters_checked = False
        self._warned: set[str] = set()
        """Names of mistakes."""

    def add_module(self, module: nn.Module) -> None:
        """Add a module whose gradients are averaged."""
        sharded = any(is_dtensor(parameter) for parameter in module.parameters())
        self._warn(mistakes.in_ranks(ranks=self._ranks, sharded=sharded))
        if not dist.is_initialized():
            synced = sum(isinstance(one, nn.SyncBatchNorm) for one in module.modules())
            self._warn(mistakes.in_statistics(sync_batch_norms=synced))
        embeddings = [
            (name, one) for name, one in module.named_modules() if isinstance(one, nn.Embedding | nn.EmbeddingBag)
        ]
        renormalizing = [name or "the module" for name, one in embeddings if one.max_norm is not None]
        self._warn(mistakes.in_forward_pass(renormalizing=renormalizing))
        self._trained.add(module)
        self.common.add_module(module)
        if not self._parameters_checked:
            self._modules.append(module)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Add an optimizer that steps when a step commits."""
        self._trained.add(optimizer)
        self.common.add_optimizer(optimizer)
        if not self._parameters_checked:
            self._optimizers.append(optimizer)

    def trained(self) -> list[nn.Module | Optimizer]:
        """Return the added modules and optimizers."""
        return list(self._trained)

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of the added modules and optimizers; of a DTensor its local part."""
        for one in self._trained:
            groups = one.param_groups if isinstance(one, Optimizer) else [{"params": one.parameters()}]
            for parameter in itertools.chain.from_iterable(group["params"] for group in groups):
                if (gradient := parameter.grad) is not None and gradient.layout is torch.strided:
                    yield gradient.to_local() if is_dtensor(gradient) else gradient

    def quorum_requested(self, now: float) -> None:
        """Check the registered state before the first quorum. ``now``: monotonic seconds."""
        if self._ended_at is not None:
            self._pause, self._ended_at = now - self._ended_at, None
        if self._discarded_with:
            before, self._discarded_with = self._discarded_with, ()
            self._warn(mistakes.in_discarded(changes=changes(before, self.common.of_step())))
        if not self._asked:
            self._asked = True
            self._warn(mistakes.in_state(registered=self._state.registered))

    def discarded(self) -> None:
        """Note a step that was discarded, and in which this group did not heal."""
        self._discarded_with = self.common.of_step()

    def committed(self, step: int, now: float, *, groups: int, collectives: int, synchronized: bool) -> None:
        """Check a committed step; after the first one, the parameters too, and later the states of optimizers.

        Args:
            step: number of committed steps.
            now: monotonic seconds.
            groups: see ``mistakes.in_commit``, also for the other arguments.
        """
        if self._last_step is not None and not synchronized:  # else such steps, and what lies between, are the method
            self._warn(mistakes.in_pause(seconds=self._pause, missed=step - self._last_step - 1))
        self._last_step, self._ended_at, self._pause = step, now, 0.0
        if not collectives and self._trains():
            self._warn(mistakes.in_commit(groups=groups, collectives=collectives, synchronized=synchronized))
        self._commits += 1
        if not self._parameters_checked:
            self._parameters_checked = True
            self._check(self._judge_parameters)
            self._modules = []
        elif self._commits in OPTIMIZERS_CHECKED_AT and self._optimizers:
            self._check(lambda covered: [mistakes.in_optimizer(_states(one, covered)) for one in self._optimizers])
            if self._commits == OPTIMIZERS_CHECKED_AT[-1]:
                self._optimizers = []

    def _trains(self) -> bool:
        """Return whether a module trains, unlike some stages of a pipeline. True: no module is known."""
        modules = [one for one in self._trained if isinstance(one, nn.Module)]
        return not modules or any(one.requires_grad for module in modules for one in module.parameters())

    def _judge_parameters(self, covered: StateCoverage) -> Sequence[Mistake | None]:
        if frozen := _unregistered_frozen(self._modules, covered):
            self.common.frozen = sampled(frozen)
        return mistakes.in_parameters(_facts(self._modules, self._optimizers, covered))

    def _check(self, judge: Callable[[StateCoverage], Sequence[Mistake | None]]) -> None:
        if not self._state.registered or not (self._modules or self._optimizers):
            return
        try:  # by every rank: the state_dict of FSDP is collective
            found = judge(StateCoverage(self._state.user_state()))
        except Exception as error:  # noqa: BLE001  a heal reports it if it matters
            self._log.debug("registered state not checked", reason=f"{type(error).__name__}: {error}")
            return
        for mistake in found:
            self._warn(mistake)

    def _warn(self, mistake: Mistake | None) -> None:
        if mistake is not None and self._rank == 0 and mistake.name not in self._warned:
            self._warned.add(mistake.name)
            self._log.warning(mistake.name, reason=mistake.reason, remedy=mistake.remedy)


def _facts(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer], covered: StateCoverage) -> ParameterFacts:
    wrapped = [(name, one) for module in modules for name, one in module.named_parameters() if one.requires_grad]
    averaged = {memory_of(one) for _, one in wrapped}
    parameters = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
    optimized = [
        one for one in parameters if one.requires_grad
    ]  # an optimizer may have frozen ones, to train them later
    return ParameterFacts(
        wrapped=len(wrapped),
        unregistered=[name for name, one in wrapped if not covered.has(one)],
        optimized=len(optimized),
        unaveraged=[_shape(one) for one in optimized if memory_of(one) not in averaged],
        optimized_unregistered=[_shape(one) for one in optimized if not covered.has(one)],
    )


def _unregistered_frozen(modules: Sequence[nn.Module], covered: StateCoverage) -> list[torch.Tensor]:
    return [
        one
        for module in modules
        for name, one in module.named_parameters()
        if not (one.requires_grad or one.is_meta or is_dtensor(one) or covered.has(one))
        and name not in getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    ]


def _states(optimizer: Optimizer, covered: StateCoverage) -> OptimizerFacts:
    tensors = [one for one in tensors_in(dict(optimizer.state)) if not is_dtensor(one)]  # those may be gathered
    return OptimizerFacts(type(optimizer).__name__, len(tensors), sum(not covered.has(one) for one in tensors))


def _shape(tensor: torch.Tensor) -> str:
    return f"shape {tuple(tensor.shape)}"
