"""A sign and one of two sizes for each element."""

from __future__ import annotations

import torch

from keepstep.collectives.codecs.error_feedback import ErrorFeedbackCodec

_THRESHOLD = 1.23
"""Boundary between the two sizes, in mean absolute values: the best one for normally distributed elements."""
_SIZES_BYTES = 4
"""Bytes of the two sizes of a row."""
_EACH_BYTE = 0x01010101
"""The lowest bit of each byte of an int32."""


class TwoBit(ErrorFeedbackCodec):
    """Sends 2 bits for each element, and the error of that in later rounds.

    Each row of 512 elements has two sizes, the mean absolute values of its small and of its large elements: 6.4 % of
    the bytes of float32 to and from each other group. The error is never larger than the contribution. A row with a NaN
    or an infinity becomes NaN.
    """

    width = 512
    row_bytes = _SIZES_BYTES + width // 4

    @property
    def name(self) -> str:
        return "two-bit"

    def encode(self, rows: torch.Tensor, encoded: torch.Tensor) -> None:
        absolute = rows.abs()
        total = absolute.sum(dim=1, keepdim=True)
        threshold = total * (_THRESHOLD / self.width)
        large = torch.ge(absolute, threshold, out=torch.empty_like(rows))  # 1 or 0; a bool takes four times as long
        count = large.sum(dim=1, keepdim=True)
        of_large = absolute.mul_(large).sum(dim=1, keepdim=True)
        sums, counts = torch.cat([total - of_large, of_large], dim=1), torch.cat([self.width - count, count], dim=1)
        encoded[:, :_SIZES_BYTES].view(torch.bfloat16).copy_(sums.div_(counts.clamp_min_(1)).clamp_min_(0))
        negative = torch.lt(rows, 0, out=absolute)
        codes = negative.add_(large, alpha=2).to(torch.int8).view(torch.int32)  # four codes, one in each byte
        codes = codes | codes >> 6
        codes |= codes >> 12
        encoded[:, _SIZES_BYTES:] = codes.view(torch.uint8)[:, ::4]

    def decode(self, encoded: torch.Tensor, rows: torch.Tensor) -> None:
        sizes = encoded[:, :_SIZES_BYTES].view(torch.bfloat16).float()
        codes = encoded[:, _SIZES_BYTES:].to(torch.int32)
        codes |= codes << 6
        codes |= codes << 12
        negative, large = codes & _EACH_BYTE, codes >> 1 & _EACH_BYTE
        sign = ((negative << 8) - negative) | _EACH_BYTE  # 1 or -1 in each byte
        sign_of_large = sign & ((large << 8) - large)  # 0 for a small element
        sign_of_small = sign ^ sign_of_large
        rows.copy_(sign_of_small.view(torch.int8)).mul_(sizes[:, :1])
        rows.add_(sign_of_large.view(torch.int8).float().mul_(sizes[:, 1:]))
