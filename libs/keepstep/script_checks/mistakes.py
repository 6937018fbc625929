"""Mistakes of a training script after which groups train different models, each with its remedy. Pure.

No rule here is certain: a script may average gradients or share the work of its ranks by means of its own. So each
mistake is a warning, once, and training goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepstep_mesh.text import listed

MAX_NAMED = 3
"""Parameters that a warning names."""


LONG_PAUSE_SECONDS = 5.0
"""A group that spent less between two steps was left behind for another reason."""


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    reason: str
    """The finding, and its effect."""
    remedy: str


@dataclass(frozen=True, slots=True)
class ParameterFacts:
    """Trained parameters, compared with the registered state. Names of parameters that have none are shapes."""

    wrapped: int
    """Number of trainable parameters in all ``DistributedDataParallel`` modules; 0: no module is wrapped."""
    unregistered: Sequence[str]
    """Those of them that are not in the registered state."""
    optimized: int
    """Number of trainable parameters of all optimizers."""
    unaveraged: Sequence[str]
    """Those of them that are in no wrapped module."""
    optimized_unregistered: Sequence[str]
    """Those of them that are not in the registered state."""


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Tensors in the state of an optimizer, compared with the registered state."""

    optimizer: str
    """Name of its class."""
    tensors: int
    unregistered: int
    """Those of them that are not in the registered state."""


def in_state(*, registered: bool) -> Mistake | None:
    """Judge the first request for a quorum. ``registered``: the script has registered a state."""
    if registered:
        return None
    return Mistake(
        "no state registered",
        "a group that starts, joins, or restarts cannot receive the weights of the others and trains with its own",
        "pass state_dict and load_state_dict to the Manager, or call register_state_dict_fn",
    )


def in_commit(*, groups: int, collectives: int, synchronized: bool) -> Mistake | None:
    """Judge a committed step.

    Args:
        groups: number of groups that took part.
        collectives: number of collectives that were started in it.
        synchronized: the script called ``mark_synchronized``.
    """
    if groups < 2 or collectives or synchronized:
        return None
    return Mistake(
        "no gradients averaged",
        f"{groups} groups committed a step without an all-reduce, so each applied its own gradients",
        "call the DistributedDataParallel module, ddp(x), not the module inside it; or call manager.allreduce; or, for "
        "a model that fully_shard has sharded, average_over_groups",
    )


def in_ranks(*, ranks: int, sharded: bool) -> Mistake | None:
    """Judge a wrapped module.

    Args:
        ranks: number of ranks of this group.
        sharded: a parameter of the module is a DTensor.
    """
    if ranks < 2 or sharded:
        return None
    return Mistake(
        "every rank trains a whole model",
        f"the {ranks} ranks of this group each hold all parameters, and gradients are averaged between groups only: "
        f"rank 0 with rank 0, rank 1 with rank 1",
        "run one rank a group (keepstep run --replicas N --nproc-per-replica 1), unless the script shares the work of "
        "a group's ranks itself",
    )


def in_statistics(*, sync_batch_norms: int) -> Mistake | None:
    """Judge a wrapped module. ``sync_batch_norms``: number of its SyncBatchNorm modules without a process group."""
    if not sync_batch_norms:
        return None
    return Mistake(
        "SyncBatchNorm without a process group",
        f"{sync_batch_norms} SyncBatchNorm modules normalize over the samples of this process only, as BatchNorm does: "
        f"torch.distributed is not initialized, and a Manager does not stand for it",
        "choose a batch of a group that is large enough for BatchNorm, or GroupNorm, which needs no other samples",
    )


def in_forward_pass(*, renormalizing: Sequence[str]) -> Mistake | None:
    """Judge a wrapped module. ``renormalizing``: its embeddings with ``max_norm``, by name."""
    if not renormalizing:
        return None
    return Mistake(
        "embedding with max_norm",
        f"the forward pass of {listed(renormalizing, MAX_NAMED)} shrinks the rows that a batch of this group uses, and "
        f"those only, so the weights of groups differ after a few steps",
        "build the embedding without max_norm, and shrink its rows after each step of the optimizer, such as in "
        "Optimizer(after_commit=...)",
    )


def in_pause(*, seconds: float, missed: int) -> Mistake | None:
    """Judge the time that a group spends between two steps, in an evaluation for example.

    Args:
        seconds: from the end of a step to the request for the next quorum.
        missed: number of steps that other groups have committed without this group since then.
    """
    if seconds < LONG_PAUSE_SECONDS or missed < 1:
        return None
    return Mistake(
        "other groups went on without this one",
        f"this group spent {seconds:.0f} s between two steps, and the others committed {missed} steps without it",
        "evaluate in all groups at the same step, or raise the job's join_timeout (keepstep policy --join-timeout)",
    )


def in_discarded(*, changes: Sequence[str]) -> Mistake | None:
    """Judge what a script did after a step that was discarded, before it began the next one.

    Args:
        changes: values of its optimizers that changed, such as a learning rate, as phrases.
    """
    if not changes:
        return None
    return Mistake(
        "optimizer changed after a discarded step",
        f"a step was discarded, and the script went on as if it had counted: {listed(changes, MAX_NAMED)}; so the "
        f"schedule is ahead of the committed steps",
        "step schedulers only if optimizer.step() has returned True, or in Optimizer(after_commit=[scheduler.step])",
    )


def in_parameters(facts: ParameterFacts) -> list[Mistake]:
    """Judge the parameters that a script trains."""
    found = []
    if facts.unregistered:
        found.append(
            Mistake(
                "model not in the registered state",
                f"{_some(facts.unregistered, facts.wrapped)} of the DistributedDataParallel module do not heal",
                "return the state_dict() of the wrapped module in the Manager's state_dict",
            )
        )
    if facts.wrapped and facts.unaveraged:
        found.append(
            Mistake(
                "optimizer of other parameters",
                f"{_some(facts.unaveraged, facts.optimized)} of the optimizer are in no DistributedDataParallel "
                f"module, so their gradients are not averaged",
                "build the optimizer from the parameters of the wrapped module, after the module is on its device; or "
                "average their gradients with manager.allreduce",
            )
        )
    elif facts.optimized_unregistered and not facts.wrapped:
        found.append(
            Mistake(
                "optimizer of other parameters",
                f"{_some(facts.optimized_unregistered, facts.optimized)} of the optimizer are not in the registered "
                f"state, so they do not heal",
                "build the optimizer from the parameters of the model whose state_dict() is registered",
            )
        )
    return found


def in_optimizer(facts: OptimizerFacts) -> Mistake | None:
    """Judge an optimizer that has taken a step."""
    if not facts.unregistered:
        return None
    return Mistake(
        "optimizer not in the registered state",
        f"{facts.unregistered} of {facts.tensors} tensors in the state of {facts.optimizer} do not heal, so a group "
        f"that heals changes its weights in another way than the others",
        "return the optimizer's state_dict() in the Manager's state_dict, and load it in load_state_dict",
    )


def _some(names: Sequence[str], total: int) -> str:
    return f"{len(names)} of {total} parameters ({listed(names, MAX_NAMED)})"
