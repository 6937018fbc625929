"""A sign and one of two sizes for each element."""

from __future__ import annotations

import torch

from keepstep.collectives.codecs.error_feedback import ErrorFeedbackCodec

_THRESHOLD = 1.23
"""Boundary between the two sizes, in mean absolute values: the best one for normally distributed elements."""
_IN_BYTE = 4
_SIZES_BYTES = 4
"""Bytes of the two sizes of a row."""


class TwoBit(ErrorFeedbackCodec):
    """Sends 2 bits for each element, and the error of that in later rounds.

    Each row of 512 elements has two sizes, the mean absolute values of its small and of its large elements: 6.4 % of
    the bytes of float32 to and from each other group. The error is never larger than the contribution.
    """

    width = 512

    @property
    def name(self) -> str:
        return "two-bit"

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        absolute = rows.abs()
        large = absolute >= _THRESHOLD * absolute.mean(dim=1, keepdim=True)
        sizes = torch.stack([_mean(absolute, ~large), _mean(absolute, large)], dim=1).to(torch.bfloat16)
        codes = (large.to(torch.uint8) << 1) | rows.signbit()
        codes = codes.view(-1, self.width // _IN_BYTE, _IN_BYTE)
        packed = codes[..., 0] | codes[..., 1] << 2 | codes[..., 2] << 4 | codes[..., 3] << 6
        return torch.cat([sizes.view(-1).view(torch.uint8), packed.reshape(-1)])

    def decode(self, encoded: torch.Tensor, count: int) -> torch.Tensor:
        split = count * _SIZES_BYTES
        small, large = encoded[:split].clone().view(torch.bfloat16).view(count, 2, 1).float().unbind(1)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=encoded.device)
        codes = (encoded[split:].view(count, self.width // _IN_BYTE, 1) >> shifts).view(count, self.width)
        size = torch.where(codes & 2 != 0, large, small)
        return torch.where(codes & 1 != 0, -size, size)


def _mean(values: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return the mean of the chosen values of each row; 0 for none."""
    return values.where(chosen, 0).sum(dim=1) / chosen.sum(dim=1).clamp_min(1)
