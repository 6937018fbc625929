"""A loader that loads ahead for an ElasticSampler, and discards what it has loaded when the quorum changes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils import data

from keepstep.elastic_data.elastic_sampler import ElasticSampler
from keepstep.elastic_data.shares import Position, Share

_OF_THE_SAMPLER = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order")


class Sampling(Protocol):
    """The part of a sampler that a loader uses."""

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""
        ...

    def share_at(self, at: Position) -> Share:
        """Return this rank's share of the step at ``at``, with the ranks of now."""
        ...

    def after(self, at: Position) -> Position:
        """Return the position after a committed step at ``at``."""
        ...

    def indices(self, share: Share) -> list[int]:
        """Return the indices of a share into the dataset."""
        ...


class _Plan(data.Sampler[list[int]]):
    """Shares from ``next_at`` to the end of its epoch, as they will be if every step commits with the groups of now."""

    def __init__(self, sampler: Sampling, next_at: Position) -> None:
        self.next_at = next_at
        self.epoch = next_at.epoch
        """Epoch that is loaded."""
        self.planned: deque[Share] = deque()
        """Shares that the loader loads or has loaded, in its order."""
        self._sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        epoch = self.next_at.epoch
        while self.next_at.epoch == epoch:
            share = self._sampler.share_at(self.next_at)
            self.next_at = self._sampler.after(self.next_at)
            self.planned.append(share)
            yield self._sampler.indices(share)


class PlannedLoader:
    """Loads shares ahead in worker processes, and discards those that turn out to be others.

    Args:
        dataset: with a length, which must be that of the sampler.
        sampler: of this rank.
        **kwargs: of ``torch.utils.data.DataLoader``, without those that divide the dataset into batches.

    Raises:
        TypeError: an argument of DataLoader that the sampler decides.
        ValueError: the dataset has another length than the sampler.
    """

    def __init__(self, dataset: data.Dataset[Any], sampler: Sampling, **kwargs: Any) -> None:
        if refused := [name for name in _OF_THE_SAMPLER if name in kwargs]:
            raise TypeError(f"{type(self).__name__} takes no {', '.join(refused)}: the sampler decides the batches")
        length = len(dataset)  # type: ignore[arg-type]
        if length != sampler.length:
            raise ValueError(f"the dataset has {length} samples, and the sampler {sampler.length}; pass len(dataset)")
        self._plan = _Plan(sampler, Position(0, 0))
        self._loader: data.DataLoader[Any] = data.DataLoader(dataset, batch_sampler=self._plan, **kwargs)
        self._loading: Iterator[Any] | None = None

    def _load(self, wanted: Share) -> Any:
        plan = self._plan
        if wanted not in plan.planned:
            if wanted.position.epoch != plan.epoch:
                self._loading = None
            plan.next_at = wanted.position
        while True:
            loading = self._start(wanted.position) if self._loading is None else self._loading
            try:
                batch = next(loading)  # DataLoader(timeout=...) limits the wait for a worker
            except StopIteration:  # the batches planned for this epoch; the last steps of it did not commit
                self._loading = None
                continue
            except BaseException:  # the next batch may be this one or the one after it: discard all
                self._loading = None
                raise
            if plan.planned.popleft() == wanted:
                return batch

    def _start(self, at: Position) -> Iterator[Any]:
        """Start to load the batches from ``at`` to the end of its epoch."""
        self._plan.planned.clear()
        self._plan.next_at, self._plan.epoch = at, at.epoch
        if (set_epoch := getattr(self._loader.dataset, "set_epoch", None)) is not None:
            set_epoch(at.epoch)
        self._loading = iter(self._loader)
        return self._loading


class ElasticLoader(PlannedLoader):
    """Batches of a dataset for an ``ElasticSampler``, loaded ahead by worker processes.

    Iterate once for each epoch::

        for _ in sampler.epochs(3):
            for batch in loader:
                optimizer.zero_grad()
                (loss_of(model, batch) * sampler.weight).backward()
                optimizer.step()

    Each epoch starts its workers again, as a DataLoader does: they see what the script changed in the dataset. With
    ``persistent_workers=True`` they do not. If the dataset has a method ``set_epoch``, it is called before they start.

    Batches are planned for the groups of the last quorum. After a change, or a step that did not commit, the loader
    discards those that it has loaded ahead: at most ``num_workers * prefetch_factor``.

    Args:
        dataset: with a length, which must be that of the sampler.
        sampler: of this rank.
        **kwargs: of ``torch.utils.data.DataLoader``, without those that divide the dataset into batches.

    Raises:
        TypeError: an argument of DataLoader that the sampler decides.
        ValueError: the dataset has another length than the sampler.
    """

    def __init__(self, dataset: data.Dataset[Any], sampler: ElasticSampler, **kwargs: Any) -> None:
        super().__init__(dataset, sampler, **kwargs)
        self._sampler = sampler

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank to the end of an epoch: ``ElasticSampler.shares``."""
        return map(self._load, self._sampler.shares())

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self._sampler)

    def state_dict(self) -> dict[str, int]:
        """Return the position: ``ElasticSampler.state_dict``. Batches that are loaded ahead are in no state.

        For scripts that have a torchdata ``StatefulDataLoader`` in their checkpoint: this loader takes its place.
        """
        return self._sampler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a position, with any number of groups, ranks and workers.

        Args:
            state_dict: what ``state_dict`` of the loader or of its sampler returned.

        Raises:
            ValueError: as ``ElasticSampler.load_state_dict``.
        """
        self._sampler.load_state_dict(state_dict)
