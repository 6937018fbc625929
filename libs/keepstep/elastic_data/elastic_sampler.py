"""A sampler that gives every sample of an epoch to exactly one committed step, however groups come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.utils import data

from keepstep.elastic_data.permutation import VERSION, Order
from keepstep.elastic_data.shares import Batches, Position, Share
from keepstep_mesh.errors import KeepstepError

if TYPE_CHECKING:
    from keepstep.manager import Manager

STATE = "elastic_sampler"
"""Key of the sampler's state among the registered states of the Manager."""

MOST_LEFT_OPEN = 3
"""Number of steps in a row whose batch is drawn again before they end, at which a mistake of the script is assumed."""


class ElasticSampler(data.Sampler[list[int]]):
    """Batches of indices for one rank, cut from global batches of a constant size.

    Each step takes the next ``global_batch_size`` samples, divided among the groups that take part and their ranks. A
    step that does not commit draws the same samples again, divided among the groups that are left. So every sample of
    an epoch is in exactly one committed step, and the sequence of global batches does not depend on the number of
    groups. Multiply the mean loss of each batch by ``weight``: shares may differ by a sample, and the last batch of an
    epoch is smaller.

    A draw begins the step (``Manager.start_quorum``) and waits for its quorum. Draw once in each step: with
    ``DataLoader(dataset, batch_sampler=sampler)``, or with an ``ElasticLoader``, which loads ahead. Each of them yields
    the batches of an epoch: ``epochs`` has the loop. A draw after a batch whose step was never ended, because the
    script caught an out-of-memory error for example, discards that step and draws its samples again. The position
    heals, and is in durable checkpoints, with the rest of the state: all groups must have a sampler with the same
    arguments. Not for ``LocalSGD`` and ``DiLoCo``, whose groups take many batches between two quorums.

    Args:
        length: number of samples in the dataset.
        manager: of this replica group. A Manager has at most one ElasticSampler.
        global_batch_size: number of samples in a step of all groups.
        shuffle: whether the order is random, another one in each epoch.
        seed: of the order.
        drop_last: leave out the last batch of an epoch if it has fewer than ``global_batch_size`` samples.
        rank: number of this process among those of its group that take different samples; default: its rank.
        num_ranks: number of such processes in the group; default: the number of its ranks. Ranks that compute on the
            same samples, as with tensor parallelism, have the same ``rank``.

    Raises:
        ValueError: a number is out of range, the Manager has an ElasticSampler already, or it has ``retry_allreduce``.
    """

    def __init__(
        self,
        length: int,
        manager: Manager,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        rank = manager.group_rank() if rank is None else rank
        num_ranks = manager.group_world_size() if num_ranks is None else num_ranks
        if length < 1:
            raise ValueError(f"length={length} must be at least 1")
        if not 1 <= global_batch_size <= length:
            raise ValueError(f"global_batch_size={global_batch_size} must be in [1, length={length}]")
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank={rank} must be in [0, num_ranks={num_ranks})")
        if manager.retry_allreduce:
            raise ValueError(
                "an ElasticSampler cannot retry a step: the samples of the lost group would be in no step; make the "
                "Manager without retry_allreduce, or use a DistributedSampler"
            )
        self._manager = manager
        self._batches = Batches(length, global_batch_size, drop_last)
        self._seed = seed
        self._order = Order(length, seed, shuffle=shuffle)
        self._rank, self._num_ranks = rank, num_ranks
        self._base, self._base_step = Position(0, 0), manager.current_step()
        """A position, and the step of the Manager that begins there."""
        self._loaded = False
        """Whether a state was loaded since the last draw. The Manager's part may be loaded after it."""
        self._groups = (0, 1)
        """Number of this group among those of the last quorum, and how many took part."""
        self._drawn: int | None = None
        """The step, by number of the attempt, for which the last batch was drawn."""
        self._left_open = (0, 0)
        """Step of the Manager whose batch was last drawn again without an end of the step, and how many in a row."""
        self._share: Share | None = None
        manager.register_state_dict_fn(STATE, self.load_state_dict, self.state_dict)
        shares = f"{global_batch_size=}, {num_ranks=}, {drop_last=}"
        order = f"{shuffle=}, {seed=}, version {VERSION}"
        manager.steps.add_layout([f"elastic sampler: {length} samples, {shares}, {order}"])

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""
        return self._batches.length

    # ---- the position

    @property
    def epoch(self) -> int:
        """Epoch of the next batch, from 0 on. It grows with the commit of the last step of an epoch."""
        return self._position().epoch

    @property
    def sample(self) -> int:
        """Number of samples of this epoch that are in committed steps."""
        return self._position().sample

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the batch that was drawn last.

        Its samples times the number of ranks that take part, divided by the samples of the step: 1 for even shares, 0
        where a step has fewer samples than ranks. The batch then has one sample, which another rank counts.
        """
        return 1.0 if self._share is None else self._share.weight

    def _position(self) -> Position:
        step = self._manager.current_step()
        if self._loaded and not self._base_step <= step <= self._base_step + 1:
            return self._base
        if step < self._base_step and self._manager.torn:
            return self._base  # until the heal, which brings a position
        if step < self._base_step:
            raise KeepstepError(
                f"the Manager went back from step {self._base_step} to {step} without the sampler's position; load the "
                f"state of both from the same checkpoint"
            )
        return self._batches.advance(self._base, step - self._base_step)

    def state_dict(self) -> dict[str, int]:
        """Return the position, equal in all groups and ranks.

        Returns:
            ``epoch``, ``sample``, ``seed``, ``version`` (of the order), and ``step`` of the Manager.
        """
        at = self._position()
        place = {"epoch": at.epoch, "sample": at.sample, "step": self._manager.current_step()}
        return {**place, "seed": self._seed, "version": VERSION}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a position, with any number of groups and ranks, and any ``global_batch_size``.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            ValueError: the order is another one than here, or the position is not in the dataset.
        """
        order = {"seed": self._seed, "version": VERSION}
        saved = {name: state_dict.get(name) for name in order}
        if saved != order:
            raise ValueError(
                f"sampler state has {saved}, expected {order}: pass the same seed, or use the keepstep release that "
                f"saved it"
            )
        epoch, sample = int(state_dict["epoch"]), int(state_dict["sample"])
        if not (0 <= sample < self._batches.length and epoch >= 0):
            raise ValueError(
                f"the sampler's state is at sample {sample} of epoch {epoch}, and this dataset has "
                f"{self._batches.length} samples; load it with the dataset that it is of"
            )
        self._base = self._batches.advance(Position(epoch, sample), 0)
        step = self._manager.current_step()
        self._base_step = int(state_dict.get("step", step))
        self._loaded = self._base_step != step

    # ---- batches

    def draw(self, *, ahead: bool = True) -> Share:
        """Begin the step if none is open, wait for its quorum, and return this rank's share of its samples.

        A group that heals or is a spare gets a share too, which does not count. If a share was drawn for the open step
        already, the script has left that step: it is discarded, and this share is one of the same samples.

        Args:
            ahead: whether the caller may draw before the batch of the last draw was used, as a DataLoader with workers
                does. Then two draws in a row are an error, unless the script went on with the step
                (``Optimizer.zero_grad``) between them.

        Raises:
            RuntimeError: two shares were drawn for one step: ahead, or in the third step in a row.
            Drained, EvictedExit, MismatchExit: the process must end.
        """
        manager = self._manager
        if self._is_left_open():
            self._leave(allowed=manager.steps.continued or not ahead)
        if manager.steps.open_number is None:
            manager.start_quorum()
        self._drawn = manager.steps.open_number
        manager.steps.keep()
        if self._loaded:
            self._loaded, step = False, manager.current_step()
            if not self._base_step <= step <= self._base_step + 1:  # the state of another job, without its Manager's
                self._base_step = step
        with contextlib.suppress(Exception):  # without a quorum the step is discarded, and should_commit() logs why
            self._groups = (manager.participating_rank() or 0, max(1, manager.num_participants()))
        self._base, self._base_step = self._position(), manager.current_step()
        self._share = self.share_at(self._base)
        return self._share

    def _is_left_open(self) -> bool:
        return self._drawn is not None and self._manager.steps.open_number == self._drawn

    def _leave(self, *, allowed: bool) -> None:
        """Discard the open step, for which a batch was drawn."""
        step, (before, times) = self._manager.current_step(), self._left_open
        times = times + 1 if times and step - before in (0, 1) else 1
        self._left_open = (step, times)
        if not allowed or times >= MOST_LEFT_OPEN:
            raise RuntimeError(
                "two batches were drawn in one step: end each step with should_commit() (Optimizer.step), load ahead "
                "with ElasticLoader instead of DataLoader(num_workers=...), and split a batch for gradient accumulation"
            )
        reason = "the script left this step without should_commit() (Optimizer.step); its batch is drawn again"
        self._manager.report_error(KeepstepError(reason))
        self._manager.should_commit()

    def shares(self, *, ahead: bool = False, before: Callable[[], object] | None = None) -> Iterator[Share]:
        """Draw shares to the end of an epoch.

        A heal goes on in the epoch of the others. So the iteration ends after a step that this group has committed,
        where all groups end it; or when others finish the training.

        Args:
            ahead: see ``draw``.
            before: called before each draw, outside of the step.
        """
        if self._is_left_open():  # an exception, such as KeyboardInterrupt in a notebook, ended the last iteration
            self._leave(allowed=True)
        while True:
            if before is not None:
                before()
            yield self.draw(ahead=ahead)
            if self._ended_epoch() or self._manager.steps.groups_finish:
                return

    def _ended_epoch(self) -> bool:
        """Return whether the last step was committed, and was the last one of its epoch."""
        return self._manager.current_step() > self._base_step and self._position().epoch > self._base.epoch

    def epochs(self, number: int) -> Iterator[None]:
        """Iterate until ``number`` epochs are complete, once for each epoch::

            for _ in sampler.epochs(3):
                for batch in loader:
                    optimizer.zero_grad()
                    (loss_of(model, batch) * sampler.weight).backward()
                    optimizer.step()
                scheduler.step()
                print(f"{sampler.epoch} epochs are complete")

        The code after the inner loop runs between the same two steps in all groups. This yields no number: within the
        inner loop a group may heal, and go on in the epoch of the others, so ask ``sampler.epoch``.

        Args:
            number: of epochs in the whole training, equal in all groups.
        """
        self._manager.steps.resume_if_set()  # else a job that resumes at its end would train another epoch
        while self.epoch < number:
            yield
            if self.epoch >= number and not self._ended_epoch() and not self._manager.torn:
                # a heal brought the final state, on which the code after the inner loop ran again: finish() heals it
                self._manager.mark_torn()

    def share_at(self, at: Position) -> Share:
        """Return this rank's share of the step at ``at``, with the groups of the last quorum."""
        group, groups = self._groups
        return self._batches.share(at, group * self._num_ranks + self._rank, groups * self._num_ranks)

    def after(self, at: Position) -> Position:
        """Return the position after a committed step at ``at``."""
        return self._batches.advance(at, 1)

    def indices(self, share: Share) -> list[int]:
        """Return the indices of a share into the dataset; of an empty share one index, so that the rank can compute."""
        return self._order.indices(share)

    def __iter__(self) -> Iterator[list[int]]:
        """Draw batches to the end of an epoch: ``shares``."""
        return map(self.indices, self.shares(ahead=True))

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return self._batches.per_epoch
