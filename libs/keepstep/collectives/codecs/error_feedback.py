"""Codecs that send a coarse part of each contribution, and the rest in later rounds.

A group adds the error of its last committed round to its contribution, sends an encoding of the sum, and keeps what
the encoding left out as the error of the next round. All groups gather all encodings and decode the same bytes, so the
result is equal in all groups, and everything is sent in the end. (Error feedback: arXiv 1901.09847.)

The bytes that a group receives grow with the number of groups, as every group gets the encoding of every other one.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed import Work

from keepstep.collectives.codecs.codec import Codec, Round, RoundRunner
from keepstep.collectives.codecs.row_layout import RowLayout, blocks
from keepstep.collectives.composing import compose, reduce_alone
from keepstep.collectives.row_exchange import Exchange
from keepstep.process_group.sequence import Begin


class ErrorFeedbackCodec(Codec):
    """A codec with error feedback. Subclasses encode rows of ``width`` elements in ``row_bytes`` bytes each."""

    width: int

    def __init__(self) -> None:
        self._errors: dict[str, _Error] = {}
        """By key: parts of earlier contributions that were not sent."""
        self._pending: dict[str, _Error] = {}
        """The errors of rounds that are not settled."""

    @property
    @abstractmethod
    def row_bytes(self) -> int:
        """Bytes of an encoded row, a multiple of 4."""

    @abstractmethod
    def encode(self, rows: torch.Tensor, encoded: torch.Tensor) -> None:
        """Write the encoding of float32 rows of shape (n, width) into uint8 of shape (n, row_bytes)."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the float32 rows of shape (n, width) that ``encoded`` describes into ``rows``."""

    def error(self, key: str) -> list[torch.Tensor]:
        """Return the unsent error of ``key``, a float32 tensor for each tensor; empty before its first commit."""
        error = self._errors.get(key)
        return [] if error is None else error.layout.views(error.rows)

    def settle(self, key: str, committed: bool) -> None:
        pending = self._pending.pop(key, None)
        if committed and pending is not None:
            self._errors[key] = pending

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._errors.clear()
        self._pending.clear()

    def own_state_dict(self) -> dict[str, Any]:
        return {"errors": {key: self.error(key) for key in self._errors}}

    def load_own_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._pending.clear()
        self._errors = {}
        for key, tensors in state_dict.get("errors", {}).items():
            layout = RowLayout.of(tensors, self.width)
            self._errors[key] = _Error(layout, layout.read(tensors))

    def allreduce(self, manager: RoundRunner, key: str, tensors: list[torch.Tensor]) -> Work:
        error, shapes = self._errors.get(key), tuple(tensor.shape for tensor in tensors)
        if error is not None and error.layout.shapes != shapes:
            raise ValueError(
                f"the tensors of {key!r} have shapes {_listed(shapes)}, in the round before "
                f"{_listed(error.layout.shapes)}; use another key for other tensors"
            )
        return super().allreduce(manager, key, tensors)

    def _start(self, of_step: Round, key: str, tensors: list[torch.Tensor]) -> Work:
        self._pending.pop(key, None)
        group = of_step.process_group
        exchange = Exchange(group.rank(), group.size(), of_step.timeout)
        if exchange.ranks == 1:
            reduce_alone(group, tensors).wait()
        return compose(group, partial(self._average, of_step, key, tensors, exchange), tensors)

    def _average(self, of_step: Round, key: str, tensors: list[torch.Tensor], exchange: Exchange, begin: Begin) -> None:
        layout, error = RowLayout.of(tensors, self.width), self._errors.get(key)
        rows = layout.read(tensors)
        if not of_step.contributes:
            rows.zero_()
        elif error is not None:
            for block, rest in blocks(rows, error.rows.to(rows.device)):
                block.add_(rest)
        if exchange.ranks == 1:  # nothing is sent, so nothing is left out
            total, rows = rows, torch.zeros_like(rows)
        else:
            total = self._exchange(rows, exchange, begin)
            layout.clear_padding(rows)
        for (block,) in blocks(total):
            block.div_(max(1, of_step.participants))
        layout.write(total, tensors)
        if of_step.contributes:
            self._pending[key] = _Error(layout, rows)

    def _exchange(self, rows: torch.Tensor, exchange: Exchange, begin: Begin) -> torch.Tensor:
        """Return the sum over all ranks, and subtract what this rank sent of it from ``rows``."""
        own = torch.empty(rows.shape[0], self.row_bytes, dtype=torch.uint8, device=rows.device)
        for block, encoded in blocks(rows, own):
            self.encode(block, encoded)
        gathered = own.new_empty(exchange.ranks, *own.shape)
        exchange.gather(begin, gathered.view(-1), own.view(-1)).wait()
        total = torch.zeros_like(rows)
        for block, sum_of_block, *pieces in blocks(rows, total, *gathered):
            sent = torch.empty_like(block)
            for rank, piece in enumerate(pieces):
                self.decode(piece, sent)
                sum_of_block.add_(sent)
                if rank == exchange.rank:
                    block.sub_(sent).nan_to_num_(0, 0, 0)  # a NaN or an infinity is sent whole
        return total


@dataclass(frozen=True, slots=True)
class _Error:
    """The part of earlier contributions of a key that a group has not sent yet."""

    layout: RowLayout
    rows: torch.Tensor


def _listed(shapes: tuple[torch.Size, ...]) -> str:
    return str([tuple(shape) for shape in shapes])
