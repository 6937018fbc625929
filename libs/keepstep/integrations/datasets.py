"""Examples of a streamed Hugging Face dataset for groups that come and go. A ``datasets.Dataset`` needs no bridge."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch.utils.data import default_collate

from keepstep.elastic_data.elastic_sampler import ElasticSampler
from keepstep.elastic_data.shares import Position, Share

if TYPE_CHECKING:
    from keepstep.manager import Manager

__all__ = ["StreamLoader"]

STATE = "stream"
"""Key of the stream's own state in the state of the loader."""


class StreamLoader:
    """Batches of this rank from a stream that every rank reads. Every example is in exactly one committed step.

    A stream has no random access, so each rank reads all of it and keeps its part of each global batch; a step that
    does not commit is divided again from memory. Iterate once for each epoch, and multiply the mean loss of each batch
    by ``weight``::

        for _ in loader.sampler.epochs(3):
            for batch in loader:
                ...

    Args:
        stream: a ``datasets.IterableDataset`` that yields the same examples in every process: fixed seeds, and no
            ``split_dataset_by_node``. Each epoch begins it again, after ``set_epoch``.
        length: number of its examples in an epoch; a longer stream is cut there.
        manager: of this replica group. It has no other ``ElasticSampler``.
        global_batch_size: number of examples in a step of all groups.
        resumes: whether the stream goes on exactly from its own ``state_dict()``. Then ``state_dict`` has that state,
            and a group that loaded it reads from there on; else from the beginning of the epoch. Not for a stream with
            a shuffle buffer, whose content is in no state.
        collate_fn: makes a batch of a list of examples; default: as a DataLoader does.
        drop_last: leave out the last batch of an epoch if it is smaller.
        rank: as in ``ElasticSampler``.
        num_ranks: as in ``ElasticSampler``.

    Raises:
        ValueError: the stream is divided over nodes, or as ``ElasticSampler``.
    """

    def __init__(
        self,
        stream: Any,
        length: int,
        manager: Manager,
        global_batch_size: int,
        *,
        resumes: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        rank: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        if getattr(stream, "_distributed", None) is not None:
            raise ValueError(
                "the stream is divided by split_dataset_by_node: a group that is lost would take its examples along; "
                "pass the stream before that call"
            )
        self.sampler = ElasticSampler(
            length, manager, global_batch_size, shuffle=False, drop_last=drop_last, rank=rank, num_ranks=num_ranks
        )
        self._stream, self._resumes, self._collate = stream, resumes, collate_fn or default_collate
        self._examples: Iterator[Any] = iter(())
        self._batch: list[Any] = []
        """The global batch that begins at the first position of ``_states``."""
        self._states: dict[Position, Any] = {}
        """Of the stream at the beginning and at the end of ``_batch``."""
        self._loaded: tuple[Position, Any] | None = None

    @property
    def weight(self) -> float:
        """Factor for the mean loss of the last batch: ``ElasticSampler.weight``."""
        return self.sampler.weight

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this rank to the end of an epoch: ``ElasticSampler.shares``.

        Raises:
            ValueError: the stream has fewer examples than ``length``.
        """
        shares = self.sampler.shares(before=lambda: self._read(self._now()))  # else the other groups wait in the step
        return (self._collate(self._examples_of(share)) for share in shares)

    def __len__(self) -> int:
        """Return the number of steps in an epoch."""
        return len(self.sampler)

    def state_dict(self) -> dict[str, Any]:
        """Return the position: ``ElasticSampler.state_dict``, and with ``resumes`` the state of the ``stream``."""
        return {**self.sampler.state_dict(), **({STATE: self._place()} if self._resumes else {})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on at a position, with any number of groups and ranks, and any ``global_batch_size``.

        Args:
            state_dict: what ``state_dict`` returned.

        Raises:
            ValueError: as ``ElasticSampler.load_state_dict``.
        """
        self.sampler.load_state_dict(state_dict)
        if self._resumes and STATE in state_dict:
            place = state_dict[STATE]
            self._loaded = Position(int(place["epoch"]), int(place["sample"])), place["state"]
            self._states, self._batch = {}, []

    # ---- the stream

    def _now(self) -> Position:
        return Position(self.sampler.epoch, self.sampler.sample)

    def _place(self) -> dict[str, Any]:
        now = self._now()
        if now not in self._states:  # it healed since it read
            self._read(now)
        return {"epoch": now.epoch, "sample": now.sample, "state": self._states[now]}

    def _examples_of(self, share: Share) -> list[Any]:
        self._read(share.position)
        first = share.start - share.position.sample
        return self._batch[first : max(first + 1, share.stop - share.position.sample)]

    def _read(self, at: Position) -> None:
        """Make ``_batch`` the global batch at ``at``."""
        read = list(self._states)
        if read and read[0] == at:
            return
        if not read or read[-1] != at or at.sample == 0:
            self._seek(at, read[-1] if read else None)
        after = self.sampler.after(at)
        stop = after.sample if after.epoch == at.epoch else self.sampler.length
        before = self._state(at)
        self._batch = self._next(stop - at.sample, at.sample)
        self._states = {at: before, after: self._state(after)}

    def _seek(self, at: Position, reached: Position | None) -> None:
        self._states, self._batch = {}, []
        if reached is not None and reached.epoch == at.epoch and 0 < reached.sample <= at.sample:
            begin = reached.sample  # of a group that caught up
        else:
            begin, state = 0, None
            if self._loaded is not None and self._loaded[0].epoch == at.epoch and self._loaded[0].sample <= at.sample:
                begin, state = self._loaded[0].sample, self._loaded[1]
            self._stream.set_epoch(at.epoch)
            if self._resumes:
                self._stream.load_state_dict(state)
            self._examples = iter(self._stream)
        while begin < at.sample:
            begin += len(self._next(min(1000, at.sample - begin), begin))

    def _next(self, number: int, begin: int) -> list[Any]:
        examples = list(islice(self._examples, number))
        if len(examples) < number:
            raise ValueError(
                f"the stream ended after {begin + len(examples)} examples, and length={self.sampler.length}; pass the "
                f"number of its examples, equal in all groups"
            )
        return examples

    def _state(self, at: Position) -> Any:
        """Return the state of the stream, which has been read up to ``at``; None: at the beginning of an epoch."""
        if self._loaded is not None and self._loaded[0] == at:
            return self._loaded[1]  # a stream that has read nothing since has only the state of its beginning
        return self._stream.state_dict() if self._resumes and at.sample else None
