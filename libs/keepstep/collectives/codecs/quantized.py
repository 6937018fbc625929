"""8-bit values with one scale for each row."""

from __future__ import annotations

import torch
from torch.distributed import Work

from keepstep.collectives.all_reduce import all_reduce
from keepstep.collectives.codecs.codec import Codec, Round
from keepstep.quantization.row_format import FORMATS


class Quantized(Codec):
    """Averages 8-bit values with one scale for each 256: 25.4 % of the bytes of float32, without error feedback.

    Args:
        encoding: ``int8``, ``fp8`` (e4m3), or ``auto``: int8 in main memory, fp8 on an accelerator.

    Raises:
        ValueError: another encoding.
    """

    def __init__(self, encoding: str = "auto") -> None:
        if encoding not in (*FORMATS, "auto"):
            raise ValueError(f"invalid encoding {encoding!r}: expected auto, {', '.join(FORMATS)}")
        self._encoding = encoding

    @property
    def name(self) -> str:
        return f"quantized({self._encoding})"

    def _start(self, of_step: Round, key: str, tensors: list[torch.Tensor]) -> Work:  # noqa: ARG002
        if not of_step.contributes:
            for tensor in tensors:
                tensor.detach().zero_()
        chosen = FORMATS.get(self._encoding)
        factor = 1 / max(1, of_step.participants)
        return all_reduce(tensors, factor, of_step.process_group, of_step.timeout, chosen)
