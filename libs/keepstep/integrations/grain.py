"""Elements of a Grain dataset for groups that come and go, with the checkpoints of Grain's own elastic iterator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.utils import data

from keepstep.elastic_data.elastic_loader import ElasticLoader
from keepstep.elastic_data.elastic_sampler import ElasticSampler

if TYPE_CHECKING:
    from keepstep.manager import Manager

__all__ = ["ElasticIterator"]

NEXT_INDEX = "global_next_index"
"""Key of Grain's checkpoints: the number of elements that are in committed steps, over all epochs of ``repeat()``."""


class _Elements(data.Dataset[Any]):
    """Elements by index. A dataset of Grain has None in the place of an element that ``filter`` removed."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        element = self._source[index]
        if element is None:
            raise ValueError(
                f"element {index} of the Grain dataset is missing: filter() leaves gaps, and every index needs an "
                f"element; filter the data source, or give such an element the weight 0 in the loss"
            )
        return element


class ElasticIterator:
    """Batches of this rank from a Grain dataset with random access. Every element is in exactly one committed step.

    The part of ``grain.experimental.ElasticIterator`` with the groups of each step as its shards: step by step, the
    global batches have the same elements. Shuffle and repeat in Grain: ``ds.shuffle(seed=0).repeat(epochs)``. Do not
    batch, slice, or filter. Draw one batch in each step, and multiply its mean loss by ``weight``.

    Args:
        ds: a ``grain.MapDataset``, or a data source with ``__len__`` and ``__getitem__``; equal in all groups.
        manager: of this replica group. It has no other ``ElasticSampler``.
        global_batch_size: number of elements in a step of all groups.
        drop_last: leave out the last batch if it has fewer elements, as Grain does.
        rank: as in ``ElasticSampler``.
        num_ranks: as in ``ElasticSampler``.
        **loading: of ``torch.utils.data.DataLoader``, such as ``num_workers``, in the place of Grain's read options.

    Raises:
        TypeError: ``ds`` has no random access.
        ValueError: as ``ElasticSampler``.
    """

    def __init__(
        self,
        ds: Any,
        manager: Manager,
        global_batch_size: int,
        *,
        drop_last: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
        **loading: Any,
    ) -> None:
        if not (hasattr(ds, "__len__") and hasattr(ds, "__getitem__")):
            raise TypeError(
                f"{type(ds).__name__} has no random access: pass the grain.MapDataset before to_iter_dataset(), or a "
                f"data source with __len__ and __getitem__"
            )
        self._manager = manager
        self.sampler = ElasticSampler(
            len(ds), manager, global_batch_size, shuffle=False, drop_last=drop_last, rank=rank, num_ranks=num_ranks
        )
        self._loader = ElasticLoader(_Elements(ds), self.sampler, **loading)
        self._batches = iter(self._loader)

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the last batch: ``ElasticSampler.weight``."""
        return self.sampler.weight

    def __iter__(self) -> Iterator[Any]:
        """Return this iterator."""
        return self

    def __next__(self) -> Any:
        """Begin the step, and return this rank's part of its batch.

        Raises:
            StopIteration: all elements are in committed steps.
        """
        self._manager.steps.resume_if_set()  # else a job that resumes at its end would train another step
        if self.sampler.epoch > 0:
            raise StopIteration
        try:
            return next(self._batches)
        except BaseException:
            self._batches = iter(self._loader)
            raise

    def get_state(self) -> dict[str, int]:
        """Return the position, equal in all groups. Grain's iterators accept it.

        Returns:
            ``global_next_index``, and ``step`` of the Manager, which Grain ignores.
        """
        index = self.sampler.epoch * self.sampler.length + self.sampler.sample
        return {NEXT_INDEX: index, "step": self._manager.current_step()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on at a position, with any number of groups and any ``global_batch_size``.

        Args:
            state: of this class, or of ``grain.experimental.ElasticIterator``. The latter has no ``step``: load the
                Manager's state before it.

        Raises:
            ValueError: the position is not one of this dataset.
        """
        index = int(state.get(NEXT_INDEX, -1))
        if not 0 <= index <= self.sampler.length:
            raise ValueError(
                f"{NEXT_INDEX} of the state {state} must be in [0, {self.sampler.length}], the length of the dataset; "
                f"load a state of an ElasticIterator over the same dataset"
            )
        epoch, sample = divmod(index, self.sampler.length)
        order = {name: self.sampler.state_dict()[name] for name in ("seed", "version")}
        step = int(state.get("step", self._manager.current_step()))
        self.sampler.load_state_dict({"epoch": epoch, "sample": sample, "step": step, **order})
