"""Codecs for the outer reduction of ``keepstep.local_sgd``, or for any average over the groups of a job."""

from keepstep.collectives.codecs.codec import Codec
from keepstep.collectives.codecs.quantized import Quantized
from keepstep.collectives.codecs.top_k import TopK
from keepstep.collectives.codecs.two_bit import TwoBit

__all__ = ["Codec", "Quantized", "TopK", "TwoBit"]
