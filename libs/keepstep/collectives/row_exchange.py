"""Exchange of quantized rows: what each rank sends, reduces, and gathers."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.distributed_c10d import AllToAllOptions, Work

from keepstep.collectives.chunks import Chunk
from keepstep.process_group.sequence import Begin
from keepstep.quantization.row_format import RowFormat, multiplied

O = TypeVar("O", AllToAllOptions, AllgatherOptions)  # noqa: E741
_SHORTEST = timedelta(milliseconds=1)
"""For torch a timeout of 0 means no timeout of its own."""
_CAUSES = (
    "a peer is stuck, slow or disconnected, or does not quantize; give should_quantize and the codec the same value in "
    "all groups"
)


class Exchange:
    """The collectives of one quantized operation.

    Args:
        rank: of this process.
        ranks: number of ranks.
        timeout: of the whole operation, from its first collective; None: that of the process group, for each one.
    """

    def __init__(self, rank: int, ranks: int, timeout: timedelta | None) -> None:
        self.rank = rank
        self.ranks = ranks
        self._timeout = timeout
        self._end: float | None = None
        self._unused: dict[tuple[int, int], list[torch.Tensor]] = {}

    def send_pieces(self, begin: Begin, outgoing: torch.Tensor, incoming: torch.Tensor) -> Arrival:
        """Send each other rank its piece of ``outgoing``, in the order of ranks, and receive theirs."""
        size = outgoing.numel() // (self.ranks - 1)
        sizes = [0 if rank == self.rank else size for rank in range(self.ranks)]
        options = self._limited(AllToAllOptions())
        return Arrival(begin("alltoall_base", incoming, outgoing, sizes, list(sizes), options))

    def gather(self, begin: Begin, gathered: torch.Tensor, own: torch.Tensor) -> Arrival:
        """Gather ``own`` of all ranks, in the order of ranks."""
        return Arrival(begin("_allgather_base", gathered, own, self._limited(AllgatherOptions())))

    def buffer(self, pieces: int, size: int, device: torch.device) -> torch.Tensor:
        """Return a buffer of ``pieces`` times ``size`` bytes. Reuse one that was given back, if possible."""
        unused = self._unused.get((pieces, size))
        return unused.pop() if unused else torch.empty(pieces, size, dtype=torch.uint8, device=device)

    def give_back(self, *buffers: torch.Tensor) -> None:
        """Keep buffers for later chunks, because new memory costs a page fault for each 4 KiB."""
        for one in buffers:
            self._unused.setdefault((one.shape[0], one.shape[1]), []).append(one)

    def _limited(self, options: O) -> O:
        """Return the options with the time that is left for the operation."""
        if self._timeout is None:
            return options
        now = time.monotonic()
        if self._end is None:
            self._end = now + self._timeout.total_seconds()
        if now >= self._end:
            raise TimeoutError(
                f"a quantized collective timed out after {self._timeout.total_seconds():g} seconds: {_CAUSES}"
            )
        options.timeout = max(timedelta(seconds=self._end - now), _SHORTEST)
        return options


class Arrival:
    """A collective in flight."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        """Wait for it.

        Raises:
            TimeoutError: it took too long.
            ProcessGroupError: it failed.
        """
        try:
            self._work.wait()
        except TimeoutError as error:
            raise TimeoutError(f"a quantized collective timed out ({error}): {_CAUSES}") from None


class Reduction(Protocol):
    """The reduction of one chunk in steps: begun, then ``reduce``, then ``finish``."""

    def reduce(self) -> None: ...
    def finish(self) -> None: ...


class PairReduction:
    """The reduction of one chunk by two ranks in one round: ``__init__`` sends all rows, ``finish`` adds both.

    As many bytes as in two rounds, and half the waits. The arguments are those of ``ChunkReduction``.
    """

    def __init__(self, chunk: Chunk, exchange: Exchange, row_format: RowFormat, factor: float, begin: Begin) -> None:
        self._chunk = chunk
        self._exchange = exchange
        self._format = row_format
        self._factor = factor
        count, device = chunk.rows.shape[0], chunk.rows.device
        self._own, self._other = (exchange.buffer(1, row_format.piece_bytes(count), device) for _ in range(2))
        row_format.encode(chunk.rows, *row_format.parts(self._own[0], count))
        self._arrival = exchange.send_pieces(begin, self._own.view(-1), self._other.view(-1))

    def reduce(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Write the sum of both ranks into the rows of the chunk."""
        self._arrival.wait()
        in_order = (self._own, self._other) if self._exchange.rank == 0 else (self._other, self._own)
        rows = self._chunk.rows
        self._format.total([self._format.parts(one[0], rows.shape[0]) for one in in_order], rows, self._factor)
        self._exchange.give_back(self._own, self._other)
        self._chunk.write_back()


class ChunkReduction:
    """The reduction of one chunk: ``__init__`` sends its rows, then ``reduce``, then ``finish``.

    Args:
        chunk: its rows get the result.
        exchange: of the operation.
        row_format: of the values.
        factor: of each rank's contribution to the sum.
        begin: begins a collective.
    """

    def __init__(self, chunk: Chunk, exchange: Exchange, row_format: RowFormat, factor: float, begin: Begin) -> None:
        self._chunk = chunk
        self._exchange = exchange
        self._format = row_format
        self._factor = factor
        self._begin = begin
        self._share = -(-chunk.rows.shape[0] // exchange.ranks)
        self._bytes = row_format.piece_bytes(self._share)
        others = [rank for rank in range(exchange.ranks) if rank != exchange.rank]
        self._outgoing = self._pieces(len(others))
        for piece, rank in zip(self._outgoing, others, strict=True):
            row_format.encode(self._rows(rank), *row_format.parts(piece, self._share))
        self._incoming = self._pieces(len(others))
        self._arrival = exchange.send_pieces(begin, self._outgoing.view(-1), self._incoming.view(-1))

    def reduce(self) -> None:
        """Add the rows of the other ranks to those of this one, and send the result to all."""
        total = multiplied(self._rows(self._exchange.rank), self._factor)
        self._result = self._pieces(1)
        self._arrival.wait()
        for piece in self._incoming:
            self._format.add(*self._format.parts(piece, self._share), total, self._factor)
        self._format.encode(total, *self._format.parts(self._result[0], self._share))
        self._exchange.give_back(self._outgoing, self._incoming)
        self._gathered = self._pieces(self._exchange.ranks)
        self._arrival = self._exchange.gather(self._begin, self._gathered.view(-1), self._result.view(-1))

    def finish(self) -> None:
        """Decode the result into the rows of the chunk."""
        self._arrival.wait()
        for rank, piece in enumerate(self._gathered):
            self._format.decode(*self._format.parts(piece, self._share), self._rows(rank))
        self._exchange.give_back(self._gathered, self._result)
        self._chunk.write_back()

    def _pieces(self, count: int) -> torch.Tensor:
        return self._exchange.buffer(count, self._bytes, self._chunk.rows.device)

    def _rows(self, rank: int) -> torch.Tensor:
        """Return the rows that ``rank`` reduces: the last ranks may have fewer than the others, or none."""
        return self._chunk.rows[rank * self._share : (rank + 1) * self._share]
