"""Codecs average over groups; what they do not send in a round they send later."""

from __future__ import annotations

import pytest
import torch

from keepstep.collectives.codecs import Codec, Quantized, TopK, TwoBit
from keepstep.collectives.codecs.error_feedback import ErrorFeedbackCodec

SHAPES = [(300, 41), (7,), (), (0, 3)]
WITH_FEEDBACK = [lambda: TopK(1 / 64), TwoBit]
IDS = ["top-k", "two-bit"]


def inputs(ranks: int, seed: int = 0, shapes: list[tuple[int, ...]] | None = None) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator) for shape in shapes or SHAPES] for _ in range(ranks)]


def mean(values: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.stack(same).mean(0) for same in zip(*values, strict=True)]


def test_a_quantized_average_is_close_and_equal_in_all_groups(ranks):
    for encoding in ("int8", "fp8", "auto"):
        values = inputs(3)
        results = ranks(3, lambda: Quantized(encoding)).average(values)  # noqa: B023
        for position, expected in enumerate(mean(values)):
            assert all(torch.equal(results[0][position], one[position]) for one in results)
            assert (results[0][position] - expected).norm() <= 0.05 * expected.norm()


@pytest.mark.parametrize("make", WITH_FEEDBACK, ids=IDS)
def test_sent_values_and_error_feedback_add_up_to_the_inputs(ranks, make):
    group = ranks(3, make)
    sent = [torch.zeros(shape) for shape in SHAPES]
    due = [torch.zeros(shape) for shape in SHAPES]
    for seed in range(5):
        values = inputs(3, seed)
        results = group.average(values)
        assert all(torch.equal(a, b) for one in results for a, b in zip(one, results[0], strict=True))
        for position, expected in enumerate(mean(values)):
            sent[position] += results[0][position]
            due[position] += expected
    owed = mean([codec.error("all") for codec in group.codecs])
    for total, left, expected in zip(sent, owed, due, strict=True):
        torch.testing.assert_close(total + left, expected, rtol=1e-4, atol=1e-4)
    assert owed[0].norm() > 0.1 * due[0].norm()  # else nothing was left out, and the test shows nothing


@pytest.mark.parametrize("make", [*WITH_FEEDBACK, Quantized], ids=[*IDS, "quantized"])
def test_tensors_of_other_types_in_another_order_of_memory_or_without_elements_are_averaged(ranks, make):
    values = [[one[0].t().double(), one[1].bfloat16(), one[2].half(), one[3]] for one in inputs(2)]
    group = ranks(2, make)
    results = group.average(values)
    owed = mean([errors(codec) for codec in group.codecs]) or [torch.zeros(one.shape) for one in values[0]]
    for position, expected in enumerate(mean(values)):
        assert results[0][position].dtype is values[0][position].dtype
        assert torch.equal(results[0][position], results[1][position])
        got = results[0][position].double() + owed[position]
        assert (got - expected).norm() <= 0.02 * expected.norm()
    assert [one.shape for one in group.average([[torch.zeros(0)], [torch.zeros(0)]], key="empty")[0]] == [(0,)]


@pytest.mark.parametrize("make", WITH_FEEDBACK, ids=IDS)
def test_a_round_that_does_not_commit_leaves_the_errors_of_the_round_before(ranks, make):
    group = ranks(2, make)
    group.average(inputs(2, 1))
    before = [[error.clone() for error in codec.error("all")] for codec in group.codecs]
    first = group.average(inputs(2, 2), committed=False)
    assert all(
        torch.equal(a, b)
        for one, kept in zip(group.codecs, before, strict=True)
        for a, b in zip(one.error("all"), kept, strict=True)
    )
    again = group.average(inputs(2, 2))
    assert torch.equal(again[0][0], first[0][0])
    assert not torch.equal(group.codecs[0].error("all")[0], before[0][0])


@pytest.mark.parametrize("make", WITH_FEEDBACK, ids=IDS)
def test_each_key_has_an_error_of_its_own(ranks, make):
    group = ranks(2, make)
    group.average(inputs(2, 1), key="a")
    kept = group.codecs[0].error("a")
    group.average(inputs(2, 2, [(5000,)]), key="b")
    assert [error.shape for error in group.codecs[0].error("b")] == [(5000,)]
    assert all(torch.equal(a, b) for a, b in zip(group.codecs[0].error("a"), kept, strict=True))
    with pytest.raises(ValueError, match=r"'b' have shapes \[\(6,\)\], in the round before \[\(5000,\)\]"):
        group.codecs[0].allreduce(None, "b", [torch.zeros(6)])


@pytest.mark.parametrize("make", [*WITH_FEEDBACK, Quantized], ids=[*IDS, "quantized"])
def test_a_group_that_does_not_contribute_gets_the_average_of_the_others_and_keeps_its_error(ranks, make):
    group = ranks(3, make)
    group.average(inputs(3, 1))
    before = [error.clone() for error in errors(group.codecs[2])]
    values = inputs(3, 2)
    values[2] = [torch.full_like(tensor, 1e6) for tensor in values[2]]
    results = group.average(values, idle=(2,))
    assert results[0][0].abs().max() < 10
    assert torch.equal(results[2][0], results[0][0])
    assert all(torch.equal(a, b) for a, b in zip(errors(group.codecs[2]), before, strict=True))


def errors(codec: Codec) -> list[torch.Tensor]:
    return codec.error("all") if isinstance(codec, ErrorFeedbackCodec) else []


@pytest.mark.parametrize("make", WITH_FEEDBACK, ids=IDS)
def test_a_group_that_loads_the_state_of_another_begins_without_errors(ranks, make):
    group = ranks(2, make)
    group.average(inputs(2, 1))
    states = [codec.state_dict() for codec in group.codecs]
    assert states[0] == states[1]  # groups compare their states
    group.codecs[1].load_state_dict(states[0])
    assert group.codecs[1].error("all") == []
    assert group.codecs[0].error("all")
    group.average(inputs(2, 2))
    with pytest.raises(ValueError, match="use one codec in all groups"):
        group.codecs[0].load_state_dict(Quantized().state_dict())


@pytest.mark.parametrize("make", WITH_FEEDBACK, ids=IDS)
def test_groups_that_load_their_own_states_go_on_as_if_they_had_not_stopped(ranks, make):
    group, again = ranks(2, make), ranks(2, make)
    group.average(inputs(2, 1))
    for codec, loading in zip(group.codecs, again.codecs, strict=True):
        loading.load_state_dict(codec.state_dict())
        loading.load_own_state_dict(codec.own_state_dict())
    expected, results = group.average(inputs(2, 2)), again.average(inputs(2, 2))
    assert all(torch.equal(a, b) for a, b in zip(expected[0], results[0], strict=True))


def test_a_single_group_sends_nothing_and_leaves_nothing_out(ranks):
    group = ranks(1, TwoBit)
    values = inputs(1)
    assert all(torch.equal(a, b) for a, b in zip(group.average(values)[0], values[0], strict=True))
    assert not any(error.any() for error in group.codecs[0].error("all"))


@pytest.mark.parametrize("make", [*WITH_FEEDBACK, Quantized], ids=[*IDS, "quantized"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_nan_or_an_infinity_is_never_averaged_to_something_finite(ranks, make, bad):
    group = ranks(2, make)
    values = inputs(2)
    values[1][0][17, 3] = bad
    for one in group.average(values):
        assert not one[0][17, 3].isfinite()
        assert one[1].isfinite().all()
    assert all(error.isfinite().all() for codec in group.codecs for error in errors(codec))


def test_the_names_tell_the_parameters():
    assert [codec.name for codec in (Quantized(), Quantized("fp8"), TopK(0.01), TwoBit())] == [
        "quantized(auto)", "quantized(fp8)", "top-k(41 of 4096)", "two-bit",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "invalid fraction 0"),
        (lambda: TopK(1.5), "invalid fraction 1.5"),
        (lambda: Quantized("int4"), "invalid encoding 'int4': expected auto, int8, fp8"),
    ],
)
def test_parameters_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_tensors_that_cannot_be_encoded_are_refused():
    for tensors, message in (
        ([], "no tensors to average"),
        ([torch.zeros(3, dtype=torch.int64)], "cannot quantize a tensor of torch.int64"),
    ):
        with pytest.raises(ValueError, match=message):
            TwoBit().allreduce(None, "all", tensors)
