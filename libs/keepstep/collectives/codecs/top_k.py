"""The largest elements of each row."""

from __future__ import annotations

import torch

from keepstep.collectives.codecs.error_feedback import ErrorFeedbackCodec

INDEX_BYTES = 2


class TopK(ErrorFeedbackCodec):
    """Sends the elements of the largest absolute values, and the others in later rounds.

    Elements are chosen from each row of 4096 and sent as bfloat16 with an index of 2 bytes: for a fraction of 1/64,
    1.6 % of the bytes of float32 to and from each other group. A tensor of a few elements is sent whole.

    Args:
        fraction: of the elements to send in each round, in (0, 1].

    Raises:
        ValueError: a fraction out of range.
    """

    width = 4096

    def __init__(self, fraction: float) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"invalid fraction {fraction}: expected more than 0 and at most 1")
        self._fraction = fraction
        self._kept = max(1, round(fraction * self.width))

    @property
    def name(self) -> str:
        return f"top-k({self._fraction:g})"

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        indices = rows.abs().topk(self._kept, dim=1, sorted=False).indices
        values = rows.gather(1, indices).to(torch.bfloat16)
        return torch.cat([indices.to(torch.int16).view(-1).view(torch.uint8), values.view(-1).view(torch.uint8)])

    def decode(self, encoded: torch.Tensor, count: int) -> torch.Tensor:
        split = count * self._kept * INDEX_BYTES
        indices = encoded[:split].view(torch.int16).view(count, self._kept).long()
        values = encoded[split:].clone().view(torch.bfloat16).view(count, self._kept).float()
        return torch.zeros(count, self.width, device=encoded.device).scatter_(1, indices, values)
