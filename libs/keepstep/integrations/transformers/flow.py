"""The callback that lets a Trainer count committed steps only, and places the ends of epochs by them.

on_step_begin       begin the step, before the forward pass
on_optimizer_step   global_step is about to grow by one: make it that of the Manager
on_step_end         a step that did not commit is not logged, evaluated or saved; epochs end by committed steps
on_epoch_end        ignore the end of this process's data
"""

# ruff: noqa: ARG002, SLF001  methods have the parameters of TrainerCallback; sums of losses have no public name
from __future__ import annotations

import math
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy


class CommittedFlow(TrainerCallback):  # type: ignore[misc]  # its package may be missing
    """Follows ``DefaultFlowCallback``, and corrects what that decides.

    Args:
        trainer: a Trainer with ``KeepstepMixin``, whose steps it follows.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loss_before: Any = None
        """Sum of the losses since the last log, before this step."""
        self._step_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.num_train_epochs = math.ceil(state.max_steps / self._trainer.steps_in_epoch)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        manager = self._trainer.manager
        self._loss_before = self._trainer._tr_loss.clone()
        if manager.steps.open_number is None:
            self._trainer.save_before_leaving()
            manager.start_quorum()
        self._step_before = state.global_step

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer, step = self._trainer, self._trainer.manager.current_step()
        if not trainer.committed:
            trainer._tr_loss.copy_(self._loss_before)
        elif step != self._step_before + 1:  # a heal: the losses before it belong to other steps
            trainer._tr_loss.sub_(self._loss_before)
            trainer._globalstep_last_logged = trainer._initial_global_step = step - 1
            trainer._total_loss_scalar = 0.0
        state.global_step = step - 1  # the Trainer is about to add 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        steps = self._trainer.steps_in_epoch
        state.epoch = state.global_step / steps
        if not self._trainer.committed:
            control.should_log = control.should_evaluate = control.should_save = False
        elif state.global_step % steps == 0:
            control.should_log |= args.logging_strategy == IntervalStrategy.EPOCH
            control.should_evaluate |= args.eval_strategy == IntervalStrategy.EPOCH and args.eval_delay <= state.epoch
            control.should_save |= args.save_strategy == SaveStrategy.EPOCH

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log = control.should_evaluate = control.should_save = False
