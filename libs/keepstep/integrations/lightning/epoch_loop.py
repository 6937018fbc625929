"""Lightning's loop over the batches of an epoch, which counts only steps that committed.

After a step that did not commit, Lightning's counters are those of before it: the batch number, ``global_step``, and
the step of the loggers. Schedulers and validation pass it over. So equal numbers of committed steps mean equal
positions in all groups, and an epoch has equally many committed steps in all of them.
"""

from __future__ import annotations

import math
from typing import Any

from keepstep.integrations.lightning.lightning_modules import fabric_data, loops
from keepstep.integrations.ranks_of_group import any_of_ranks, ranks_of_group


class CommittedEpochLoop(loops._TrainingEpochLoop):  # type: ignore[misc]  # noqa: SLF001  has no public name
    """Takes the place of ``Trainer.fit_loop.epoch_loop``.

    Args:
        replaced: the loop of the Trainer.
    """

    def __init__(self, replaced: Any) -> None:
        super().__init__(replaced.trainer, replaced.min_steps, replaced.max_steps)
        self.__dict__.update(replaced.__dict__)  # the Trainer has connected its data already
        self.discarded = False
        """Whether the step of this batch did not commit."""
        self._began_at = 0
        """Batches of this epoch before those of the open step."""
        self._in_step = 0
        """Batches of the open step, with the one that Lightning runs."""
        self._drawn = 0
        """Batches of the data loader since its iteration began."""
        self._moved = False
        """Whether a heal went on in another place."""
        self._healed = False
        """Whether a heal came in the open step."""

    # ---- the course of an epoch

    def on_run_start(self, data_fetcher: Any) -> None:
        super().on_run_start(data_fetcher)
        self._began_at = self.batch_progress.current.ready
        self._drawn = data_fetcher.fetched

    def advance(self, data_fetcher: Any) -> None:
        self.discarded = False
        if self._moved or (data_fetcher.length is not None and self._drawn >= data_fetcher.length):
            self._iterate_again(data_fetcher)
        self._drawn += 1
        super().advance(data_fetcher)

    def _iterate_again(self, data_fetcher: Any) -> None:
        """Begin another pass over the data: after a heal, or in place of batches whose steps did not commit."""
        self._moved, self._drawn = False, 0
        fit = self.trainer.fit_loop
        for loader in fit._combined_loader.flattened:  # noqa: SLF001
            fabric_data._set_sampler_epoch(loader, fit.epoch_progress.current.processed)  # noqa: SLF001
        iter(data_fetcher)
        data_fetcher.fetched = self.batch_progress.current.ready

    def _batches(self) -> float:
        """Return the number of batches in an epoch; infinity: unknown."""
        return float(self.trainer.num_training_batches)

    def begin_batch(self) -> None:
        """Count a batch of the open step, after Lightning did."""
        self._in_step = self.batch_progress.current.ready - self._began_at
        self._mark_last_batch()

    def _mark_last_batch(self) -> None:
        """Correct Lightning's flag, which tells how many batches this process has drawn."""
        if math.isfinite(self._batches()):
            self.batch_progress.is_last_batch = self.batch_progress.current.ready >= self._batches()

    def end_step(self, step: int, *, committed: bool) -> None:
        """Count a step, before Lightning does.

        Args:
            step: number of committed steps.
            committed: whether this one did.
        """
        self._in_step, healed, self._healed = 0, self._healed, False
        if committed:
            self._began_at = self.batch_progress.current.ready
        else:
            repeated = self.batch_progress.current.ready - self._began_at
            # in manual optimization an earlier step of this batch may have committed; a heal may bring the last place
            self.discarded = healed or repeated > 0
            if math.isfinite(self._batches()):
                self._shift(self.batch_progress, -repeated)
                fetcher = self.trainer.fit_loop._data_fetcher  # noqa: SLF001
                fetcher.fetched, fetcher.done = self._began_at, False
                self._mark_last_batch()
        for progress in (
            self.automatic_optimization.optim_progress.optimizer.step,
            self.manual_optimization.optim_step_progress,
        ):
            progress.total.ready, progress.total.completed = step, step - 1  # Lightning is about to add 1

    def on_advance_end(self, data_fetcher: Any) -> None:
        if ranks_of_group() > 1:  # SIGTERM comes to each rank at another time, and all of them end after one batch
            signals, device = self.trainer._signal_connector, self.trainer.strategy.root_device  # noqa: SLF001
            signals.received_sigterm = any_of_ranks(signals.received_sigterm, device)
        super().on_advance_end(data_fetcher)

    # ---- a step that did not commit did not happen

    def _should_accumulate(self) -> bool:
        return self.discarded or bool(super()._should_accumulate())

    def _repeats(self) -> bool:
        """Return whether another batch takes the place of this one."""
        return self.discarded and math.isfinite(self._batches())

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        return not self._repeats() and bool(super()._should_check_val_fx(data_fetcher))

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if not self._repeats():
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    # ---- the place in the training, which heals

    def position(self) -> dict[str, int | bool]:
        """Return the place of this group. It loads at any point of another group's step."""
        batches = self.batch_progress
        return {
            "epoch": self._epoch(),
            "batch": self._began_at,
            "in_step": self._in_step,
            "total_batches": batches.total.ready - (batches.current.ready - self._began_at),
            "logged_steps": self._batches_that_stepped,
            "should_stop": self.trainer.should_stop,
        }

    def load_position(self, position: dict[str, int | bool]) -> None:
        """Go on at the place of another group, with this group's part of its step.

        Args:
            position: what ``position`` returned.
        """
        self._healed = True
        batch, in_step = int(position["batch"]), self._in_step
        if in_step:
            in_step = int(position["in_step"] or min(in_step, self._batches() - batch))
        epochs = int(position["epoch"]) - self._epoch()
        self._moved |= epochs != 0 or batch != self._began_at
        self._shift(self.trainer.fit_loop.epoch_progress, epochs)
        before = self.batch_progress.current.ready
        self._shift(self.batch_progress, batch + in_step - before)
        total = int(position["total_batches"]) + in_step - self.batch_progress.total.ready
        self._shift_one(self.batch_progress.total, total)
        self._began_at = batch
        self._mark_last_batch()
        self._batches_that_stepped = int(position["logged_steps"])
        self.trainer.should_stop = bool(position["should_stop"])

    def _epoch(self) -> int:
        """Return the number of this epoch; after the last one, the number of that one."""
        return max(0, int(self.trainer.fit_loop.epoch_progress.current.ready) - 1)

    def _shift(self, progress: Any, number: int) -> None:
        """Move all counters: those of batches or epochs that have begun keep their distance from the others."""
        self._shift_one(progress.current, number)
        self._shift_one(progress.total, number)

    @staticmethod
    def _shift_one(counters: Any, number: int) -> None:
        for name in ("ready", "started", "processed", "completed"):
            setattr(counters, name, getattr(counters, name) + number)
