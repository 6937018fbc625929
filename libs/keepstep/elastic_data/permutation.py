"""The order of samples in one epoch, computed for single positions: a dataset of any size needs no memory for it."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from keepstep.elastic_data.shares import Share

ROUNDS = 8
VERSION = 1
"""Version of the order. Increase it with every change after which a seed gives another order."""

_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF_WORD = np.uint64(32)


class Permutation:
    """A pseudorandom permutation of ``range(length)``: a Feistel network over the next power of four.

    Args:
        length: number of samples, at least 1.
        seed: any integer.
        epoch: another epoch has another order.
    """

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        self._length = length
        self._half_bits = np.uint64(max(1, (max(1, length - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.blake2b(f"{VERSION}:{seed}:{epoch}:{length}".encode(), digest_size=8 * ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8")

    def at(self, start: int, stop: int) -> list[int]:
        """Return the samples at the positions ``range(start, stop)``."""
        values = self._encrypt(np.arange(start, stop, dtype=np.uint64))
        while (outside := values >= self._length).any():  # the next power of four is less than 4 times the length
            values[outside] = self._encrypt(values[outside])
        found: list[int] = values.tolist()
        return found

    def _encrypt(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            mixed = (right ^ key) * _FIRST
            mixed = (mixed ^ (mixed >> _HALF_WORD)) * _SECOND
            left, right = right, left ^ ((mixed >> _HALF_WORD) & self._mask)
        return (left << self._half_bits) | right


class Order:
    """The order of samples in all epochs.

    Args:
        length: number of samples.
        seed: of the order.
        shuffle: whether it is random, another one in each epoch.
    """

    def __init__(self, length: int, seed: int, *, shuffle: bool) -> None:
        self._length, self._seed, self._shuffle = length, seed, shuffle
        self._epoch: tuple[int, Permutation] | None = None

    def indices(self, share: Share) -> list[int]:
        """Return the indices of a share into the dataset; of an empty share one index, so that the rank can compute."""
        start, stop = share.start, max(share.stop, share.start + 1)
        if not self._shuffle:
            return list(range(start, stop))
        epoch = share.position.epoch
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, Permutation(self._length, self._seed, epoch))
        return self._epoch[1].at(start, stop)
