"""Arguments of a Trainer that mean something else in a group: they are refused, or taken over from Transformers."""

from __future__ import annotations

import signal
from typing import Any

from torch import nn

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.text import listed

log = get_logger("keepstep.integrations")

IN_BACKWARD = ("layerwise", "lomo")
"""Ends of the names of optimizers that change the weights in the backward pass."""


def check_arguments(args: Any) -> None:
    """Raise ValueError for ``TrainingArguments`` that do not work with groups."""
    if args.auto_find_batch_size:
        raise ValueError(
            "auto_find_batch_size=True would choose another batch size in each group, and groups must agree on the "
            "steps of an epoch: pass per_device_train_batch_size"
        )
    optim = str(getattr(args.optim, "value", args.optim))
    if optim.endswith(IN_BACKWARD):
        raise ValueError(
            f"optim={optim!r} changes the weights in the backward pass, before the gradients are averaged over the "
            f"groups and before the step commits: use an optimizer that steps after it, such as 'adamw_torch' or "
            f"'galore_adamw'"
        )
    if getattr(args.accelerator_config, "split_batches", False):
        raise ValueError(
            "split_batches=True divides a batch over the processes of Accelerate, and a group is one process: pass "
            "per_device_train_batch_size, the number of samples of one group, without split_batches"
        )


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise ValueError for an optimizer that trains parameters outside of the model, such as those of a loss."""
    known = {id(one) for one in model.parameters()}
    outside = [
        f"shape {tuple(one.shape)}"
        for group in optimizer.param_groups
        for one in group["params"]
        if id(one) not in known
    ]
    if outside:
        raise ValueError(
            f"the optimizer trains {len(outside)} parameters that are not in the model, such as those of a loss: "
            f"{listed(outside, 3)}. Each group would train its own, as each process of torchrun does: make them a part "
            f"of the model, or use a loss without parameters"
        )


def check_stream(dataset: Any) -> None:
    """Raise ValueError for an undivided stream of Hugging Face datasets; warn of any other stream.

    Args:
        dataset: an ``IterableDataset`` to train on.
    """
    remedy = (
        'split_dataset_by_node(stream, rank=int(os.environ["REPLICA_GROUP_ID"]), '
        'world_size=int(os.environ["NUM_REPLICA_GROUPS"]))'
    )
    if not hasattr(dataset, "_distributed"):
        log.warning(
            "a stream is not divided over the groups",
            reason="each group trains on all samples that this IterableDataset yields in its process",
            remedy="yield the part of REPLICA_GROUP_ID, of NUM_REPLICA_GROUPS parts",
        )
    elif dataset._distributed is None:  # noqa: SLF001  datasets has no public name for it
        raise ValueError(
            f"the stream is not divided, so that all groups would train on the same samples: pass {remedy}"
        )


def warn_of_undivided(kind: str) -> None:
    """Warn of a training loader that has not asked for the samples of its group.

    Args:
        kind: name of the Trainer's class.
    """
    log.warning(
        "samples are not divided over the groups",
        reason=f"get_train_dataloader of {kind} did not call _get_train_sampler, so each group draws from all samples",
        remedy="pass the share of REPLICA_GROUP_ID, of NUM_REPLICA_GROUPS, as train_dataset, and the same max_steps",
    )


def take_over_sigterm(trainer: Any) -> bool:
    """Take the callback of ``enable_jit_checkpoint`` from a Trainer, and its signal handler from the process.

    A group saves at the end of the step, before it leaves after SIGTERM. The callback saves three seconds after the
    signal, and ends the training: by then the group has left, and another last step than that of the other groups is an
    error.

    Returns:
        Whether the Trainer had one.
    """
    handler = trainer.callback_handler
    for one in [one for one in handler.callbacks if type(one).__name__ == "JITCheckpointCallback"]:
        handler.callbacks.remove(one)
        if one.jit_manager is not None:
            signal.signal(signal.SIGTERM, one.jit_manager._original_sigterm_handler or signal.SIG_DFL)  # noqa: SLF001
    return bool(getattr(trainer.args, "enable_jit_checkpoint", False))
