"""Memory for the tensors that a group reduces: one tensor for each collective, and views into it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

BUCKET_CAP_MB = 32.0
"""Default size of a bucket in MiB."""


def size_in_bytes(bucket_cap_mb: float) -> int:
    """Return the size of a bucket of ``bucket_cap_mb`` MiB. ValueError unless it is above 0."""
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} must be above 0; None means {BUCKET_CAP_MB:g} MiB")
    return max(1, int(bucket_cap_mb * 2**20))


def assign(items: Sequence[tuple[Hashable, int]], cap_bytes: int) -> list[list[int]]:
    """Return the buckets, each a list of indices into ``items``.

    Items of one kind fill a bucket in their order until the next would exceed ``cap_bytes``; a larger item has a bucket
    of its own.

    Args:
        items: the kind and the size in bytes of each item; only items of one kind share a bucket.
        cap_bytes: size of a bucket.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], int]] = {}
    for index, (kind, size) in enumerate(items):
        bucket, used = filling.get(kind, ([], 0))
        if not bucket or used + size > cap_bytes:
            bucket, used = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[kind] = (bucket, used + size)
    return buckets


def allocate(like: Sequence[torch.Tensor], cap_bytes: int | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Allocate tensors to reduce.

    Args:
        like: tensors of the shapes, dtypes and devices to allocate.
        cap_bytes: size of a bucket; None: a tensor of its own for each.

    Returns:
        The tensors to reduce, which are dense and not empty, and for each of ``like`` a view of its shape into them.
    """
    filled = [index for index, one in enumerate(like) if one.numel()]
    kinds = [((like[index].dtype, like[index].device), _bytes(like[index])) for index in filled]
    buckets = [[number] for number in range(len(filled))] if cap_bytes is None else assign(kinds, cap_bytes)
    whole, views = [], dict[int, torch.Tensor]()
    for bucket in buckets:
        members = [filled[number] for number in bucket]
        first, sizes = like[members[0]], [like[index].numel() for index in members]
        flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        whole.append(flat)
        for index, piece in zip(members, torch.split(flat, sizes), strict=True):
            views[index] = piece.view(like[index].shape)
    return whole, [views[index] if one.numel() else torch.empty_like(one) for index, one in enumerate(like)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
