"""The Trainer of Transformers as one of several replica groups.

``zero_grad`` of the optimizer is never called by a Trainer: a step begins in the callback ``CommittedFlow``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed import ReduceOp
from torch.utils.data import IterableDataset, Sampler, Subset
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import DefaultFlowCallback, ExportableState

from keepstep.data import DistributedSampler
from keepstep.integrations.group_number import group_and_groups
from keepstep.integrations.ranks_of_group import any_of_ranks, largest_of_ranks, of_rank_0
from keepstep.integrations.transformers.accelerated import (
    GroupOptimizer,
    check_ranks,
    give_to_fsdp2,
    is_sharded,
    replace_model,
    replace_optimizer,
)
from keepstep.integrations.transformers.flow import CommittedFlow
from keepstep.integrations.transformers.group_arguments import (
    check_arguments,
    check_optimizer,
    check_stream,
    take_over_sigterm,
    warn_of_undivided,
)
from keepstep.integrations.transformers.token_weighting import TokenWeighting
from keepstep.manager import Manager
from keepstep.process_group.torch_backends.nccl import group_class

MANAGER_FILE = "keepstep.json"
"""In each checkpoint folder, beside ``trainer_state.json``."""

NONE = -1
"""In place of the step of a checkpoint."""

STAGES = ("_init_training_state", "_prepare_for_training", "_finalize_training", "_evaluate")
"""Methods of the Trainer that ``KeepstepMixin`` extends. Versions before 5.3 have other ones, and would call none."""

if missing := [name for name in STAGES if not hasattr(transformers.Trainer, name)]:
    raise ImportError(
        f"transformers {transformers.__version__} has a Trainer without {', '.join(missing)}, and would train each "
        f"group alone: install a version from 5.3 on"
    )


class KeepstepMixin:
    """Makes a Trainer train with other replica groups: ``class MyTrainer(KeepstepMixin, SFTTrainer)``.

    ``global_step`` counts committed steps, and the training ends after ``max_steps`` of them. Model, optimizer,
    scheduler, GradScaler, the best metric and the state of callbacks heal. Each group trains on its shard of the
    samples, and evaluates on all of them. One group writes checkpoints, to an ``output_dir`` that all groups share.

    Args:
        manager: of this replica group, without registered state. Default: at the first use, ``Manager`` with
            ``ProcessGroupNCCL`` on a CUDA device, ``ProcessGroupXCCL`` on an XPU, else with ``ProcessGroupGloo``.
        **kwargs: of the Trainer.

    Raises:
        ValueError: the ranks of this group each have a whole model, the process sees several GPUs, or an argument would
            let groups differ.
    """

    def __init__(self, *args: Any, manager: Manager | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        trainer: Any = self
        check_ranks(trainer.accelerator, trainer.model)
        if getattr(trainer, "is_distributed_loading_by_transformers", False):  # of later versions
            give_to_fsdp2(trainer.model)
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"this group sees {trainer.args.n_gpu} GPUs, and a Trainer would split batches over them: give it one "
                f"(keepstep run --gpus-per-replica 1)"
            )
        check_arguments(trainer.args)
        self._manager = manager
        self._agrees = False
        """Whether the metrics of this evaluation become those of all groups."""
        self.steps_in_epoch = 1
        """Number of committed steps in an epoch."""
        self._group_optimizer: GroupOptimizer | None = None
        self._weighting: TokenWeighting | None = None
        self._divided = False
        """Whether the last training loader has asked for the samples of this group."""
        self._jit_checkpoint = take_over_sigterm(trainer)
        """Whether a group that is asked to leave writes a checkpoint first."""
        self._place: int | None = 0
        """Number of this group among those of the last committed step; 0 before the first one."""
        callbacks = trainer.callback_handler.callbacks
        default = next((i for i, one in enumerate(callbacks) if isinstance(one, DefaultFlowCallback)), -1)
        callbacks.insert(default + 1, CommittedFlow(self))  # callbacks of the script see what it corrects

    @property
    def manager(self) -> Manager:
        """The Manager of this group. A Trainer that only evaluates makes none."""
        if self._manager is None:
            kind = group_class(self.args.device.type)  # type: ignore[attr-defined]
            self._manager = Manager(pg=kind())
        return self._manager

    @property
    def committed(self) -> bool:
        """Whether the last step committed. ``on_step_end`` of callbacks is called in any case."""
        return self._group_optimizer is not None and self._group_optimizer.committed

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train to the end in all groups, and close the job. After an exception the group has left it.

        Args:
            resume_from_checkpoint: as of the Trainer. True: the newest checkpoint that was written to its end.
            *args: of the Trainer.
            **kwargs: of the Trainer.

        Raises:
            RuntimeError: this Trainer has trained already.
            ValueError: no checkpoint to resume from.
            Exception: as the Trainer and the Manager.
        """
        if self._group_optimizer is not None:
            raise RuntimeError(
                "this Trainer has trained already, which has closed its job: train again in a new process, with "
                "another KEEPSTEP_JOB"
            )
        if resume_from_checkpoint is True:
            folder, device = self.args.output_dir, self.args.device  # type: ignore[attr-defined]
            step = of_rank_0(newest_checkpoint(folder), device)
            if step == NONE:
                raise ValueError(
                    f"no complete checkpoint in {folder!r}: pass the output_dir of the training to resume, or leave "
                    f"out resume_from_checkpoint"
                )
            resume_from_checkpoint = f"{folder}/checkpoint-{step}"
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        except BaseException:
            if self._manager is not None:
                self._manager.shutdown()  # else the other groups would wait for the next step of this one
            raise

    # ---- data and length of the training

    def get_train_dataloader(self) -> Any:
        """Return the data of this group, with workers that have random numbers of their own in each group."""
        trainer: Any = self
        groups, group = os.environ.get("NUM_REPLICA_GROUPS", "1"), os.environ.get("REPLICA_GROUP_ID", "0")
        if isinstance(trainer.train_dataset, IterableDataset) and groups != "1":
            check_stream(trainer.train_dataset)
        self._divided = False
        loader = super().get_train_dataloader()  # type: ignore[misc]
        own_sampler = type(self)._get_train_sampler is not KeepstepMixin._get_train_sampler  # noqa: SLF001  ours
        if groups != "1" and not (self._divided or own_sampler or isinstance(trainer.train_dataset, IterableDataset)):
            warn_of_undivided(type(self).__name__)
        begin = getattr(loader, "worker_init_fn", None)
        if isinstance(begin, partial) and "rank" in begin.keywords and group.isdecimal():
            loader.worker_init_fn = partial(
                begin, rank=int(group) * trainer.args.world_size + trainer.args.process_index
            )
        return loader

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        trainer: Any = self
        dataset = trainer.train_dataset if train_dataset is None else train_dataset
        if dataset is None or not hasattr(dataset, "__len__"):
            return super()._get_train_sampler(train_dataset)  # type: ignore[misc]
        self._divided = True
        of_class = super()._get_train_sampler  # type: ignore[misc]
        if of_class.__func__ is not transformers.Trainer._get_train_sampler:  # noqa: SLF001  such as of trl's GRPO
            group, groups = group_and_groups("override _get_train_sampler")
            share = range(group, len(dataset) // groups * groups, groups)
            return ShareSampler(of_class(Subset(dataset, share)), share)
        strategy = trainer.args.train_sampling_strategy
        if strategy not in ("random", "sequential"):
            raise ValueError(f"train_sampling_strategy={strategy!r} does not know groups: use 'random' or 'sequential'")
        group, groups = group_and_groups("override _get_train_sampler")
        seed = trainer.args.seed if trainer.args.data_seed is None else trainer.args.data_seed
        return DistributedSampler(dataset, group, groups, 0, 1, shuffle=strategy == "random", seed=seed)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[Any, ...]:
        epochs, self.steps_in_epoch, *others = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        del epochs  # steps that did not commit are repeated: only the number of committed steps ends the training
        return (sys.maxsize, self.steps_in_epoch, *others)

    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(max_steps, *args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        return (sys.maxsize if trainer.state.global_step >= max_steps else epochs), batches

    # ---- model, optimizer, state

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        trainer: Any = self
        if self._group_optimizer is None:
            self._group_optimizer = replace_optimizer(self.manager, trainer.accelerator, trainer.optimizer)
            trainer.optimizer = self._group_optimizer
        return super().create_scheduler(num_training_steps, optimizer)  # type: ignore[misc]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, Any]:
        model, dataloader = super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        trainer: Any = self
        if not is_sharded(model):
            check_optimizer(trainer.optimizer, model)
        replicated = replace_model(self.manager, trainer.accelerator, model)
        trainer.model_wrapped = replicated
        self._weighting = TokenWeighting(self.manager, trainer.accelerator, replicated)
        self._register(model)
        return replicated, dataloader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Compute the gradients of a batch. The tokens of all groups count alike in their average.

        Args:
            model: as of the Trainer.
            inputs: as of the Trainer.
            num_items_in_batch: tokens of this group in the step, over all batches of an accumulation.
        """
        trainer: Any = self
        counted = num_items_in_batch is not None and (
            trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
        )
        if self._weighting is None or not counted or not trainer.args.average_tokens_across_devices:
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc, no-any-return]
        with self._weighting.of(num_items_in_batch) as at_least_one:
            return super().training_step(model, inputs, at_least_one)  # type: ignore[misc, no-any-return]

    def save_before_leaving(self) -> None:
        """Write the checkpoint of ``enable_jit_checkpoint``, if this group was asked to leave the job."""
        trainer: Any = self
        if not self._jit_checkpoint or trainer.state.global_step == 0:
            return
        if any_of_ranks(self.manager.leaving, trainer.args.device):  # the signal comes to each rank at another time
            self._jit_checkpoint = False
            self._save_checkpoint(trainer.model, trial=None)

    def _register(self, model: nn.Module) -> None:
        trainer: Any = self
        register, inner = self.manager.register_state_dict_fn, trainer.optimizer.optimizer
        register("model", model.load_state_dict, model.state_dict)
        register("optimizer", inner.load_state_dict, inner.state_dict)
        register("scheduler", trainer.lr_scheduler.load_state_dict, trainer.lr_scheduler.state_dict)
        if (scaler := trainer.accelerator.scaler) is not None:
            register("scaler", scaler.load_state_dict, scaler.state_dict)
        if getattr(trainer.args, "sync_ref_model", False):  # of trl: it follows the model
            register("ref_model", trainer.ref_model.load_state_dict, trainer.ref_model.state_dict)
        register("trainer", self._load_decisions, self._decisions)
        self.manager.compare_only(["model", "optimizer", "scheduler"])

    def _stateful(self) -> list[Any]:
        trainer: Any = self
        stateful = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        return sorted(stateful, key=lambda one: type(one).__name__)  # a resume changes the order of the callbacks

    def _decisions(self) -> dict[str, Any]:
        """Return what decides about saving and stopping."""
        trainer: Any = self
        state = trainer.state
        return {
            "best_metric": state.best_metric,
            "best_global_step": state.best_global_step,
            "best_model_checkpoint": state.best_model_checkpoint,
            "should_training_stop": trainer.control.should_training_stop,
            "callbacks": [one.state()["attributes"] for one in self._stateful()],
        }

    def _load_decisions(self, saved: dict[str, Any]) -> None:
        trainer: Any = self
        for name in ("best_metric", "best_global_step", "best_model_checkpoint"):
            setattr(trainer.state, name, saved[name])
        trainer.control.should_training_stop = saved["should_training_stop"]
        for one, attributes in zip(self._stateful(), saved["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._agrees = self.committed and self.manager.steps.open_number is None
        try:
            metrics: dict[str, float] = super()._evaluate(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._agrees = False
        return metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate. In the training, metrics become the largest ones of all groups, which stop and save by them."""
        output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]
        if self._agrees:
            names = sorted(name for name, value in output.metrics.items() if isinstance(value, int | float))
            device = self.args.device  # type: ignore[attr-defined]
            own = torch.tensor([output.metrics[name] for name in names], dtype=torch.float64, device=device)
            values = own.clone()
            if not self.manager.allreduce(values, reduce_op=ReduceOp.MAX).wait():
                values = own
            largest_of_ranks(values)  # the exchange may have failed on one rank only
            output.metrics.update(zip(names, values.tolist(), strict=True))
        return output

    # ---- checkpoints

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        trainer: Any = self
        self._place = self.manager.participating_rank() if self.committed else self._place
        state = trainer.state
        if state.best_global_step == state.global_step:
            # the Trainer looks for the folder, which no rank may see yet, or only some of them (SHARDED_STATE_DICT)
            folder = Path(trainer._get_output_dir(trial=trial))  # noqa: SLF001
            state.best_model_checkpoint = str(folder / f"checkpoint-{state.global_step}")
        if self._place == 0:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._inner_optimizer() as inner:
            new = not inner.state
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
            if new:  # the gradients of all steps overflowed, and the groups that save nothing have no state either
                inner.state.clear()
        if self.args.should_save:  # type: ignore[attr-defined]
            (Path(output_dir) / MANAGER_FILE).write_text(json.dumps(self.manager.state_dict()))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self._inner_optimizer():
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is None:
            return
        file, trainer = Path(checkpoint) / MANAGER_FILE, self
        if file.exists():
            self.manager.load_state_dict(json.loads(file.read_text()))
        else:  # of a Trainer without keepstep
            step = trainer.state.global_step  # type: ignore[attr-defined]
            self.manager.load_state_dict({"step": step, "batches_committed": 0})

    @contextlib.contextmanager
    def _inner_optimizer(self) -> Iterator[Any]:
        """Let torch save and load its own optimizer: it calls ``step`` of a sharded one, to create its state."""
        trainer: Any = self
        inner = trainer.optimizer = trainer.optimizer.optimizer.optim
        try:
            yield inner
        finally:
            trainer.optimizer = self._group_optimizer

    # ---- the end

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.manager.finish()  # before the best model is loaded: a group that is behind heals here
        trainer: Any = self
        trainer.state.global_step = self.manager.current_step()
        output = super()._finalize_training(*args, **kwargs)  # type: ignore[misc]
        self.manager.shutdown()
        return output


class ShareSampler(Sampler[int]):
    """Draws from the share of a group with the sampler of a Trainer's class, such as that of trl's GRPO.

    Args:
        sampler: of the share; it yields positions in it.
        share: the index of each position in the dataset.
    """

    def __init__(self, sampler: Any, share: Sequence[int]) -> None:
        self._sampler, self._share = sampler, share

    def __iter__(self) -> Iterator[int]:
        return (self._share[position] for position in self._sampler)

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, if it has an order for each epoch."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)


def newest_checkpoint(folder: str) -> int:
    """Return the step of the newest checkpoint that was written to its end; a group may die while it writes one."""
    return max((int(path.name[11:]) for path in Path(folder).glob("checkpoint-*") if _is_complete(path)), default=NONE)


def _is_complete(checkpoint: Path) -> bool:
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text())  # the last file that a Trainer writes
    except (OSError, ValueError):
        return False
    return re.fullmatch(r"checkpoint-\d+", checkpoint.name) is not None


class KeepstepTrainer(KeepstepMixin, transformers.Trainer):  # type: ignore[misc]  # its package may be missing
    """``transformers.Trainer`` as one of several replica groups. See ``KeepstepMixin``."""
