"""Codecs that send a coarse part of each contribution, and the rest in later rounds.

A group adds the error of its last committed round to its contribution, sends an encoding of the sum, and keeps what
the encoding left out as the error of the next round. All groups gather all encodings and decode the same bytes, so the
result is equal in all groups, and everything is sent in the end. (Error feedback: arXiv 1901.09847.)

The bytes that a group receives grow with the number of groups, as every group gets the encoding of every other one.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

import torch
from torch.distributed import Work

from keepstep.collectives.codecs.codec import Codec, Round, RoundRunner
from keepstep.collectives.composing import compose, reduce_alone
from keepstep.collectives.exchange import Exchange
from keepstep.process_group.sequence import Begin


class ErrorFeedbackCodec(Codec):
    """A codec with error feedback. Subclasses encode rows of ``width`` elements."""

    width: int

    def __init__(self) -> None:
        self._errors: dict[str, list[torch.Tensor]] = {}
        """By key: parts of earlier contributions that were not sent, float32."""
        self._pending: dict[str, list[torch.Tensor]] = {}
        """The errors of rounds that are not settled."""

    @abstractmethod
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the encoding of float32 rows of shape (n, width) as uint8 of one dimension."""

    @abstractmethod
    def decode(self, encoded: torch.Tensor, count: int) -> torch.Tensor:
        """Return the float32 rows of shape (count, width) that ``encoded`` describes."""

    def error(self, key: str) -> list[torch.Tensor]:
        """Return what this group has not sent yet for ``key``: a float32 tensor for each tensor; empty before it."""
        return list(self._errors.get(key, ()))

    def settle(self, key: str, committed: bool) -> None:
        pending = self._pending.pop(key, None)
        if committed and pending is not None:
            self._errors[key] = pending

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        super().load_state_dict(state_dict)
        self._errors.clear()
        self._pending.clear()

    def allreduce(self, manager: RoundRunner, key: str, tensors: list[torch.Tensor]) -> Work:
        before = [tuple(error.shape) for error in self.error(key)]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if before and before != shapes:
            raise ValueError(
                f"the tensors of {key!r} have shapes {shapes}, in the round before {before}; use another key for other "
                "tensors"
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
        if of_step.contributes:
            values = [tensor.detach().to(torch.float32, copy=True) for tensor in tensors]
            for value, error in zip(values, self.error(key), strict=False):
                value.add_(error)
        else:
            values = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in tensors]
        if exchange.ranks == 1:  # nothing is sent, so nothing is left out
            totals, errors = values, [torch.zeros_like(value) for value in values]
        else:
            totals, errors = self._exchange(values, exchange, begin)
        for tensor, total in zip(tensors, totals, strict=True):
            tensor.detach().copy_(total.div_(max(1, of_step.participants)))
        if of_step.contributes:
            self._pending[key] = errors

    def _exchange(
        self, values: list[torch.Tensor], exchange: Exchange, begin: Begin
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the sums over all ranks, and what this rank's encodings leave out. Overwrites ``values``."""
        encoded = [self.encode(_rows(value, self.width)) for value in values]
        own = torch.cat(encoded)
        gathered = own.new_empty(exchange.ranks, own.numel())
        exchange.gather(begin, gathered.view(-1), own).wait()
        totals = [torch.zeros_like(value) for value in values]
        sizes = [one.numel() for one in encoded]
        for rank, whole in enumerate(gathered):
            for value, total, piece in zip(values, totals, whole.split(sizes), strict=True):
                sent = self._decoded(piece, value)
                total.add_(sent)
                if rank == exchange.rank:
                    value.sub_(sent).nan_to_num_(0, 0, 0)  # a NaN or an infinity is sent whole
        return totals, values

    def _decoded(self, piece: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        rows = self.decode(piece, -(-like.numel() // self.width))
        return rows.view(-1)[: like.numel()].view_as(like)


def _rows(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """Return the elements as rows; the last one is padded with zeros."""
    flat = tensor.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % width)).view(-1, width)
