"""The encodings of rows by codecs, and the places of tensors in rows."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.collectives.codecs import TopK, TwoBit
from keepstep.collectives.codecs.error_feedback import ErrorFeedbackCodec
from keepstep.collectives.codecs.row_layout import RowLayout, blocks
from keepstep.group.agreement import ARITHMETIC


def through(codec: ErrorFeedbackCodec, rows: torch.Tensor) -> torch.Tensor:
    """Return rows that were encoded and decoded, block by block."""
    encoded = torch.empty(rows.shape[0], codec.row_bytes, dtype=torch.uint8)
    decoded = torch.full_like(rows, 7.0)
    for block, piece, result in blocks(rows, encoded, decoded):
        codec.encode(block, piece)
        codec.decode(piece, result)
    return decoded


def normal(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("fraction", [1 / 4096, 0.001, 1 / 64, 0.02, 1 / 16, 0.125, 0.3, 1.0])
def test_top_k_sends_exactly_the_largest_elements(fraction):
    codec = TopK(fraction)
    rows = normal(20, codec.width)
    kept = round(fraction * codec.width)
    limit = rows.abs().sort(dim=1, descending=True).values[:, kept - 1 : kept]
    expected = rows.where(rows.abs() >= limit, 0).bfloat16().float()
    assert torch.equal(through(codec, rows), expected)


def test_top_k_finds_the_largest_elements_where_they_are_side_by_side_or_equal():
    codec = TopK(1 / 64)
    rows = torch.zeros(3, codec.width)
    rows[0, 1000:1064] = torch.arange(1.0, 65.0)
    rows[1, ::512] = 5.0  # one of the groups in which it searches
    rows[2] = 1.0
    decoded = through(codec, rows)
    assert torch.equal(decoded[:2], rows[:2])
    assert (decoded[2].sum(), decoded[2].max()) == (64, 1)


def test_two_bit_sends_signs_and_the_mean_sizes_of_small_and_large_elements():
    codec = TwoBit()
    rows = normal(60, codec.width)
    absolute = rows.abs()
    large = absolute >= 1.23 * absolute.mean(dim=1, keepdim=True)
    of_large, of_small = (
        (absolute * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True) for chosen in (large, ~large)
    )
    decoded = through(codec, rows)
    torch.testing.assert_close(decoded, rows.sign() * torch.where(large, of_large, of_small), rtol=2**-8, atol=0)
    assert ((rows - decoded).norm(dim=1) < 0.4 * rows.norm(dim=1)).all()


def test_two_bit_keeps_rows_with_one_size_or_none():
    rows = torch.zeros(4, TwoBit.width)
    rows[1] = -3.0
    rows[2, 5] = 2.0
    rows[3, :7] = torch.tensor([1.0, -1.0] * 3 + [1.0])
    assert torch.equal(through(TwoBit(), rows), rows)


@pytest.mark.parametrize(
    ("codec", "digest"),
    [(TwoBit(), "05a40530097b25a2"), (TopK(1 / 64), "5a92985a70303966"), (TopK(0.5), "5b59ebdd56a1fdca")],
    ids=["two-bit", "top-k", "top-k, half"],
)
def test_the_bytes_of_an_encoding_change_only_with_the_version_of_the_arithmetic(codec, digest):
    """Groups that encode differently would decode rubbish. If this fails, increase ARITHMETIC with the digests."""
    rows = (torch.arange(2.0 * codec.width) * 7919 % 4099 - 2048.75).view(2, -1)  # sums are exact, in any order
    encoded = torch.empty(2, codec.row_bytes, dtype=torch.uint8)
    codec.encode(rows, encoded)
    if isinstance(codec, TopK):  # the order within a row has no meaning
        indices, values = (part.clone() for part in codec._parts(encoded))
        order = indices.argsort(dim=1)
        encoded = torch.cat([part.gather(1, order).view(torch.uint8) for part in (indices, values)], dim=1)
    assert (ARITHMETIC, hashlib.blake2b(encoded.numpy().tobytes(), digest_size=8).hexdigest()) == (5, digest)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.lists(st.sampled_from([0, 1, 3, 8, 130]), max_size=3).map(tuple), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64]),
    turned=st.booleans(),
)
def test_tensors_of_any_shape_are_read_into_rows_and_written_back(shapes, dtype, turned):
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    if turned:
        tensors = [one.permute(tuple(reversed(range(one.dim())))) for one in tensors]
    layout = RowLayout.of(tensors, 8)
    rows = layout.read(tensors)
    assert rows.shape == (sum(-(-one.numel() // 8) for one in tensors), 8)
    assert rows.count_nonzero() == sum(int(one.count_nonzero()) for one in tensors)
    assert rows.sum().item() == pytest.approx(sum(one.float().sum().item() for one in tensors), abs=0.1)
    copies = [torch.full_like(one, 9.0) for one in tensors]
    layout.write(rows, copies)
    assert all(torch.equal(copy, one.float().to(dtype)) for copy, one in zip(copies, tensors, strict=True))
    rows.fill_(1.0)
    layout.clear_padding(rows)
    assert rows.sum() == sum(one.numel() for one in tensors)


def test_a_block_has_less_elements_than_torch_starts_threads_for():
    rows = torch.zeros(500, 512)
    sizes = [block.numel() for block, _ in blocks(rows, torch.zeros(500, 3))]
    assert sum(sizes) == rows.numel()
    assert max(sizes) < 32768
