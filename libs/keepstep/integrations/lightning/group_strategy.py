"""The part that keepstep's strategies for Lightning's Trainer have in common: the steps of a group, and its decisions.

on_train_batch_start   begin the step, before the forward pass
optimizer_step         run the closure (forward, backward, clip), and step if the step commits
on_train_end           wait until all groups have the final weights
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.distributed import ReduceOp

from keepstep.integrations.group_number import group_and_groups
from keepstep.integrations.lightning.callback_state import load_states, states
from keepstep.integrations.lightning.epoch_loop import CommittedEpochLoop
from keepstep.integrations.lightning.lightning_modules import callbacks, fabric_data, strategies, trainer_states
from keepstep.manager import Manager
from keepstep.optim import OptimizerWrapper
from keepstep.process_group.torch_backends.nccl import group_class

COMPARED = ("model", "optimizers", "lr_schedulers", "precision")
"""Parts of the state that are equal in all groups between two steps. Callbacks may have times and paths of a group."""


class GroupStrategy(strategies.ParallelStrategy):  # type: ignore[misc]  # its package may be missing
    """The part of a strategy that trains with other groups. A class of Lightning comes after it in the bases.

    Args:
        manager: arguments of ``keepstep.Manager``, such as ``{"use_async_quorum": False}``.
        process_group: over the groups; default: that of the devices (NCCL on CUDA, XCCL on XPU, else Gloo).
        save_once: True: one group writes and removes checkpoints, in a folder that all groups share. False: every group
            does, in a folder of its own.
        **kwargs: of the class of Lightning.
    """

    def __init__(
        self,
        manager: Mapping[str, Any] | None = None,
        process_group: Any = None,
        save_once: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._manager_arguments = dict(manager or {})
        self._replica_group = process_group
        self._save_once = save_once
        self._manager: Manager | None = None
        self._optimizer: ClosureOptimizer | None = None
        self._loop: CommittedEpochLoop | None = None
        self._place: int | None = 0
        """Number of this group among those of the last committed step; 0 before the first one."""

    @property
    def manager(self) -> Manager:
        """The Manager of this group.

        Raises:
            RuntimeError: ``fit`` has not begun.
        """
        if self._manager is None:
            raise RuntimeError("no Manager yet: Trainer.fit makes it, before the setup hooks")
        return self._manager

    @property
    def committed(self) -> bool:
        """Whether the last step committed. ``on_train_batch_end`` is called in any case."""
        return self._optimizer is not None and self._optimizer.committed

    # ---- the ranks of this group

    def _data_parallel(self) -> tuple[int, int]:
        """Return which of the ranks of this group that train on different samples this is, and their number."""
        return 0, 1

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Arguments of the samplers that Lightning adds: each group trains on its shard, and evaluates on all samples.

        Raises:
            ValueError: the environment has no number of this group.
        """
        rank, ranks = self._data_parallel()
        if not self.lightning_module.trainer.training:
            return {"num_replicas": ranks, "rank": rank}
        group, groups = group_and_groups(
            "use an ElasticLoader, or Trainer(use_distributed_sampler=False) with a sampler of your own"
        )
        return {"num_replicas": groups * ranks, "rank": group * ranks + rank}

    def process_dataloader(self, dataloader: object) -> object:
        """Seed the workers of each group differently in training, after ``seed_everything(workers=True)``."""
        if self.lightning_module.trainer.training and (group := os.environ.get("REPLICA_GROUP_ID", "")).isdecimal():
            rank = int(group) * self.world_size + self.global_rank
            fabric_data._auto_add_worker_init_fn(dataloader, rank)  # noqa: SLF001  else for the rank in this group
        return super().process_dataloader(dataloader)

    def _configure_launcher(self) -> None:
        """Launch nothing: ``keepstep run`` or another launcher starts the groups."""

    def _make_manager(self) -> None:
        """Make the Manager of a ``fit``."""
        if not self._fitting():
            return
        if self._manager is not None:
            raise RuntimeError(
                "fit has run in this process, and closed its job at the end: run another fit in a new process, with "
                "another KEEPSTEP_JOB, and a Tuner with another strategy"
            )
        group = self._replica_group or group_class(self.root_device.type)()
        self._manager = Manager(pg=group, **self._manager_arguments)

    def _fitting(self) -> bool:
        return bool(self.lightning_module.trainer.state.fn == trainer_states.TrainerFn.FITTING)

    # ---- model, optimizer, state

    def setup(self, trainer: Any) -> None:
        if not self._fitting():
            self._setup_evaluation(trainer)
            return
        if not isinstance(trainer.fit_loop.epoch_loop, CommittedEpochLoop):
            trainer.fit_loop.epoch_loop = CommittedEpochLoop(trainer.fit_loop.epoch_loop)
        self._loop = trainer.fit_loop.epoch_loop
        if self._layer_sync is not None:
            raise ValueError(
                "sync_batchnorm=True has no effect: its statistics of a batch would be those of one group; remove it, "
                "and use a larger batch or another normalization"
            )
        super().setup(trainer)
        if len(self.optimizers) != 1:
            raise ValueError(
                f"configure_optimizers returned {len(self.optimizers)} optimizers: strategy='keepstep' needs one; "
                f"docs/training.md has loops for several"
            )
        for one in trainer.callbacks:
            if isinstance(one, callbacks.ModelCheckpoint):
                one._link_checkpoint = partial(self._link_checkpoint, one._link_checkpoint)  # noqa: SLF001  "link"
        if self._optimizer is None:
            self._average_gradients()
            self._optimizer = ClosureOptimizer(self.manager, self.optimizers[0])
            self._register(trainer)

    @abstractmethod
    def _setup_evaluation(self, trainer: Any) -> None:
        """Set up ``validate``, ``test`` and ``predict``, in which a group evaluates on its own."""

    def _average_gradients(self) -> None:
        """Let the backward pass average the gradients over the groups, if the model does not yet."""

    def _register(self, trainer: Any) -> None:
        """Register everything that changes with the steps."""
        module, register = self.lightning_module, self.manager.register_state_dict_fn

        register("model", module.load_state_dict, module.state_dict)
        register("callbacks", partial(load_states, trainer), partial(states, trainer.callbacks))
        register("optimizers", *_each(self.optimizers))  # after callbacks, which may add groups of parameters
        register("lr_schedulers", *_each([one.scheduler for one in self.lr_scheduler_configs]))
        register("precision", self.precision_plugin.load_state_dict, self.precision_plugin.state_dict)
        if self._loop is not None:
            register("position", self._loop.load_position, self._loop.position)
        self.manager.compare_only(COMPARED)

    # ---- a step

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._loop is not None:
            self._loop.begin_batch()
        self._begin()

    def _begin(self) -> None:
        """Begin the step, unless it is open: a sampler began it, or this is a later batch of an accumulation."""
        if self.manager.steps.open_number is None:
            self.manager.start_quorum()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if output is None and self.lightning_module.automatic_optimization:
            raise RuntimeError(
                "training_step returned None: the other groups wait for the gradients of this one; return a loss that "
                "is zero, such as 0.0 * loss"
            )
        return output

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        self._begin()  # with manual optimization, a batch may have several steps
        super().pre_backward(closure_loss)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        committing, scaler = self._optimizer, getattr(self.precision_plugin, "scaler", None)
        if committing is None or self._loop is None:
            raise RuntimeError("no optimizer yet: Trainer.fit has not set up this strategy")
        if scaler is None:
            output = super().optimizer_step(committing, closure, model, **kwargs)
        else:
            output = closure()
            scaler.unscale_(committing)  # hooks see the gradients, and may clip them
            self.precision_plugin._after_closure(self.lightning_module, optimizer)  # noqa: SLF001  clips
            scaler.step(committing)
            scaler.update()
        if committing.committed:
            self._place = self.manager.participating_rank()
        self._loop.end_step(self.manager.current_step(), committed=committing.committed)
        return output

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002  Lightning's name
        """Decide as the other ranks and groups do, in the time between two steps.

        The weights are equal. Metrics of equal samples may differ by the rounding of different devices.

        Args:
            decision: of this group.
            all: whether all groups have to agree; else one suffices.
        """
        decision = bool(super().reduce_boolean_decision(decision, all))
        if not (self._fitting() and self.committed) or self.manager.steps.open_number is not None:
            return decision
        flag = torch.tensor([float(decision)], device=self.root_device)
        work = self.manager.allreduce(flag, reduce_op=ReduceOp.MIN if all else ReduceOp.MAX)
        decision = bool(flag.item()) if work.wait() else decision
        return bool(super().reduce_boolean_decision(decision, all))  # the exchange may have failed on one rank only

    def on_train_end(self) -> None:
        super().on_train_end()
        self.manager.finish()

    def teardown(self) -> None:
        fitting = self._manager is not None and self._fitting()
        super().teardown()
        if fitting:
            self.manager.shutdown()

    # ---- checkpoints

    def _writes(self) -> bool:
        return not self._save_once or self._manager is None or self._place == 0

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._manager is not None:
            checkpoint["keepstep"] = self._manager.state_dict()
        if self._writes():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _link_checkpoint(self, link: Callable[..., None], *arguments: Any) -> None:
        """Let the group that writes set the link of ``ModelCheckpoint(save_last="link")`` to its last checkpoint."""
        if self._writes():
            link(*arguments)

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._writes():
            super().remove_checkpoint(filepath)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._load_step(checkpoint)

    def _load_step(self, checkpoint: Mapping[str, Any]) -> None:
        without = {"step": int(checkpoint["global_step"]), "batches_committed": 0}  # of another strategy
        self.manager.load_state_dict(checkpoint.get("keepstep", without))


def _each(parts: list[Any]) -> tuple[Callable[[list[Any]], None], Callable[[], list[Any]]]:
    """Return functions that load and save the states of all parts."""

    def load(saved: list[Any]) -> None:
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(state)

    return load, lambda: [part.state_dict() for part in parts]


class ClosureOptimizer(OptimizerWrapper):
    """``keepstep.Optimizer`` that Lightning's precision plugins step: it runs their closure, and then may commit.

    The closure is the forward and the backward pass.

    Attributes:
        committed: whether the last step committed.
    """

    committed = False

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None) -> Any:
        """Run the closure, and step the optimizer if the step commits. Return what the closure returned."""
        output = closure() if closure is not None else None
        stepped = super().step(grad_scaler=grad_scaler)
        self.committed = stepped or (grad_scaler is not None and self.manager.errored() is None)  # with an overflow
        return output
