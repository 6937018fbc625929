"""Quantized all-reduce and reduce-scatter over real process groups."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import AllreduceOptions, HashStore, ReduceOp
from torch.distributed.distributed_c10d import BarrierOptions

from keepstep.collectives import (
    allocate_reduce_scatter_output,
    allreduce_quantized,
    get_padded_sizes,
    reduce_scatter_quantized,
)
from keepstep.collectives.chunks import CHUNK_ROWS, chunks_of
from keepstep.process_group import (
    ErrorSwallowingProcessGroupWrapper,
    FakeProcessGroupWrapper,
    ProcessGroup,
    ProcessGroupBabyGloo,
    ProcessGroupDummy,
    ProcessGroupError,
    ProcessGroupGloo,
)
from keepstep.quantization.row_format import ROW
from tests.support.jobs.cohort import Cohort

WITHIN = 0.05
"""Goal for the norm of the error, relative to the norm of the exact result."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


class Counting(ProcessGroupGloo):
    """Counts the bytes that it sends to other ranks, and lists its collectives."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self.sent = 0
        self.began: list[str] = []

    def _run(self, operation: str, *args: Any) -> Any:
        self.began.append(operation)
        if operation == "alltoall_base":
            self.sent += args[1].nbytes
        elif operation == "_allgather_base":
            self.sent += args[1].nbytes * (self.size() - 1)
        elif operation == "allreduce":
            self.sent += round(args[0][0].nbytes * 2 * (self.size() - 1) / self.size())  # as a ring does
        return super()._run(operation, *args)


@pytest.fixture(scope="module", params=[2, 3])
def lasting(request: pytest.FixtureRequest) -> Iterator[Cohort]:
    made = Cohort(request.param)
    made.configure()
    yield made
    made.close()


def inputs(ranks: int, shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(ranks)]


def exact(values: list[list[torch.Tensor]], operation: Any) -> list[torch.Tensor]:
    sums = [torch.stack(same).double().sum(0) for same in zip(*values, strict=True)]
    return [one / len(values) for one in sums] if operation == ReduceOp.AVG else sums


def reduced(
    cohort: Cohort, values: list[list[torch.Tensor]], operation: Any = ReduceOp.AVG
) -> list[list[torch.Tensor]]:
    def run(group: ProcessGroup, rank: int) -> list[torch.Tensor]:
        tensors = [tensor.clone() for tensor in values[rank]]
        assert allreduce_quantized(tensors, operation, group).wait()
        return tensors

    results = cohort.each(run)
    for one in results:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, results[0], strict=True))
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("operation", [ReduceOp.SUM, ReduceOp.AVG], ids=["sum", "average"])
def test_an_all_reduce_is_close_and_equal_in_all_ranks(lasting, dtype, operation):
    shapes = [(3, 5 * CHUNK_ROWS * ROW // 8), (1000,), (7, 1, 33), (), (0, 4)]  # more than one chunk
    values = inputs(len(lasting.groups), shapes, dtype)
    results = reduced(lasting, values, operation)
    for result, expected in zip(results[0][:2], exact(values, operation), strict=False):
        assert (result.double() - expected).norm() <= WITHIN * expected.norm()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(
        st.lists(st.sampled_from([0, 1, 2, 5, 255, 256, 300]), max_size=2).map(tuple), min_size=1, max_size=5
    ),
    average=st.booleans(),
)
def test_any_list_of_shapes_is_reduced_whole(lasting, shapes, average):
    values = inputs(len(lasting.groups), shapes)
    operation = ReduceOp.AVG if average else ReduceOp.SUM
    result = reduced(lasting, values, operation)[0]
    for position, expected in enumerate(exact(values, operation)):
        largest = max([float(one[position].abs().max()) for one in values] if expected.numel() else [0.0])
        assert ((result[position] - expected).abs() <= len(values) * largest / 60).all()


def test_tensors_that_are_not_contiguous_or_need_gradients_are_written(lasting):
    def run(group: ProcessGroup, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        turned, parameter = torch.full((40, 30), 1.0 + rank).t(), torch.nn.Parameter(torch.full((5,), 2.0 * rank))
        allreduce_quantized([turned, parameter], ReduceOp.SUM, group).wait()
        return turned, parameter.detach()

    ranks = len(lasting.groups)
    for turned, parameter in lasting.each(run):
        torch.testing.assert_close(turned, torch.full((30, 40), ranks * (ranks + 1) / 2), rtol=0.01, atol=0)
        torch.testing.assert_close(parameter, torch.full((5,), float(ranks * (ranks - 1))), rtol=0.01, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_in_one_rank_is_finite_in_none(lasting, bad):
    values = inputs(len(lasting.groups), [(1000,), (1000,)])
    values[1][0][600] = bad
    for first, second in reduced(lasting, values):
        assert first[600].isnan()
        assert first[:512].isfinite().all()
        assert second.isfinite().all()


def test_a_sum_that_overflows_its_type_is_not_finite(lasting):
    values = [[torch.full((9,), 6e4, dtype=torch.float16)] for _ in lasting.groups]
    assert reduced(lasting, values, ReduceOp.SUM)[0][0].isinf().all()
    torch.testing.assert_close(reduced(lasting, values)[0][0], values[0][0])


@pytest.mark.parametrize("kind", [ProcessGroupGloo, ProcessGroupBabyGloo])
def test_other_collectives_begin_after_all_of_a_quantized_one(cohort, kind):
    group = cohort(3, kind=kind)
    size = 3 * CHUNK_ROWS * ROW

    def run(one: ProcessGroup, rank: int) -> tuple[float, float, float]:
        first, second, plain = torch.full((size,), 1.0 + rank), torch.full((50,), 2.0), torch.full((3,), float(rank))
        works = [
            allreduce_quantized([first], ReduceOp.SUM, one),
            allreduce_quantized([second], ReduceOp.SUM, one),
            one.allreduce([plain], ReduceOp.SUM),
        ]
        assert all(work.wait() for work in works)
        return first[-1].item(), second[0].item(), plain[0].item()

    for result in group.each(run):
        assert result == pytest.approx((6.0, 6.0, 3.0), rel=0.01)


@pytest.mark.parametrize("size", [2, 3])
def test_a_large_tensor_costs_at_most_30_percent_of_the_bytes_and_two_ranks_exchange_once(cohort, size):
    ranks = cohort(size, kind=Counting)

    def run(group: Counting, rank: int) -> tuple[int, int]:
        tensor = torch.randn(2_000_000)
        group.allreduce([tensor]).wait()
        plain, group.sent = group.sent, 0
        allreduce_quantized([tensor], ReduceOp.SUM, group).wait()
        assert ("_allgather_base" in group.began) == (size > 2)
        return group.sent, plain

    for quantized, plain in ranks.each(run):
        assert 0.25 < quantized / plain <= 0.26


def test_a_reduce_scatter_leaves_each_rank_its_rows(lasting):
    ranks = len(lasting.groups)
    values = inputs(ranks, [(7, 30), (500,), (2, 3, 4), (0, 2)])
    kept = [tensor.clone() for tensor in values[0]]

    def run(group: ProcessGroup, rank: int) -> torch.Tensor:
        output, sizes = allocate_reduce_scatter_output(values[rank], ranks)
        assert sizes == get_padded_sizes(values[rank], ranks)
        assert reduce_scatter_quantized(output, values[rank], ReduceOp.AVG, group).wait()
        return output

    outputs = lasting.each(run)
    begin = 0
    for expected, padded in zip(exact(values, ReduceOp.AVG), get_padded_sizes(values[0], ranks), strict=True):
        share = padded.numel() // ranks
        whole = torch.cat([output[begin : begin + share] for output in outputs])
        begin += share
        assert (whole[: expected.numel()] - expected.reshape(-1)).norm() <= WITHIN * expected.norm()
        assert not whole[expected.numel() :].any()
    assert begin == outputs[0].numel()
    assert all(torch.equal(a, b) for a, b in zip(kept, values[0], strict=True))


def test_padded_sizes_round_the_first_dimension_up():
    tensors = [torch.zeros(5, 3), torch.zeros(4), torch.zeros(()), torch.zeros(0, 2), torch.zeros(2, 3, 4)]
    expected = [(6, 3), (4, 1), (2, 1), (0, 2), (2, 3, 4)]
    assert [tuple(size) for size in get_padded_sizes(tensors, 2)] == expected
    with pytest.raises(ValueError, match=r"the tensors differ: torch.float16 on cpu, torch.float32 on cpu"):
        allocate_reduce_scatter_output([torch.zeros(2), torch.zeros(2).half()], 2)


def test_chunks_hold_every_element_once_and_no_more_rows_than_allowed():
    flats = [torch.arange(float(size)) for size in (0, 1, 256, 257, 5000, 3)]
    chunks = chunks_of(flats, limit=4)
    assert torch.equal(torch.cat([part for parts in chunks for part in parts]), torch.cat(flats))
    rows = [sum(-(-part.numel() // ROW) for part in parts) for parts in chunks]
    assert max(rows) == 4
    assert len(chunks) <= 8


def test_a_tensor_that_cannot_be_quantized_is_refused():
    group = ProcessGroupDummy()
    for tensors, operation, message in (
        ([torch.zeros(3, dtype=torch.int64)], ReduceOp.SUM, "cannot quantize a tensor of torch.int64"),
        ([torch.zeros(3), torch.zeros(3, dtype=torch.bool)], ReduceOp.SUM, "cannot quantize a tensor of torch.bool"),
        ([torch.zeros(3)], ReduceOp.MAX, "expected ReduceOp.SUM or ReduceOp.AVG"),
        ([torch.zeros(3, 3).to_sparse()], ReduceOp.SUM, "torch.sparse_coo: expected a dense tensor"),
        ([torch.zeros(3, 1).expand(3, 4)], ReduceOp.SUM, r"elements of a tensor of shape \(3, 4\) share memory"),
    ):
        with pytest.raises(ValueError, match=message):
            allreduce_quantized(tensors, operation, group)
    with pytest.raises(ValueError, match="invalid output of shape"):
        reduce_scatter_quantized(torch.zeros(2), [torch.zeros(3)], ReduceOp.SUM, group)


def test_a_group_of_one_rank_keeps_its_values():
    tensor = torch.randn(700)
    kept, group = tensor.clone(), ProcessGroupDummy()
    assert allreduce_quantized([tensor], ReduceOp.AVG, group).wait()
    assert torch.equal(tensor, kept)
    output, _ = allocate_reduce_scatter_output([tensor], 1)
    assert reduce_scatter_quantized(output, [tensor], ReduceOp.SUM, group).wait()
    assert torch.equal(output, kept)


def test_a_group_that_is_not_configured_raises_and_does_not_pass_for_a_group_of_one_rank():
    group, tensor = ProcessGroupGloo(), torch.ones(300)
    for reduce in (
        lambda: allreduce_quantized([tensor], ReduceOp.SUM, group).wait(),
        lambda: reduce_scatter_quantized(torch.zeros(300), [tensor], ReduceOp.SUM, group).wait(),
    ):
        with pytest.raises(ProcessGroupError, match="not configured"):
            reduce()


def test_an_abort_ends_a_quantized_collective_and_the_next_configuration_works(cohort):
    ranks = cohort(2)
    alone = ranks.groups[0]
    tensors = [torch.ones(3 * CHUNK_ROWS * ROW), torch.ones(9)]
    works = [allreduce_quantized([tensor], ReduceOp.SUM, alone) for tensor in tensors]  # the other rank never comes
    waiting = threading.Thread(target=lambda: alone.abort("enough"))
    waiting.start()
    for work in works:
        with pytest.raises(ProcessGroupError, match="enough"):
            work.wait()
        with pytest.raises(ProcessGroupError):
            work.get_future().wait()
    waiting.join()
    ranks.configure()
    assert reduced(ranks, [[torch.ones(300)], [torch.ones(300)]])[0][0][0] == 1


def test_a_thread_that_cannot_start_fails_its_own_collective_only(cohort, monkeypatch):
    ranks = cohort(2)
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", _out_of_threads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            allreduce_quantized([torch.ones(300)], ReduceOp.SUM, ranks.groups[0])
    assert reduced(ranks, [[torch.ones(300)], [torch.ones(300)]])[0][0][0] == 1


def _out_of_threads(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_configuration_ends_the_quantized_collectives_of_the_one_before(cohort):
    ranks = cohort(2)
    work = allreduce_quantized([torch.ones(3 * CHUNK_ROWS * ROW)], ReduceOp.SUM, ranks.groups[0])
    ranks.configure()
    with pytest.raises(ProcessGroupError):
        work.wait()
    assert reduced(ranks, [[torch.ones(300)], [torch.ones(300)]])[0][0][0] == 1


def test_a_peer_that_does_not_quantize_fails_the_collective_and_the_error_names_the_cause(cohort):
    ranks = cohort(2)
    options = AllreduceOptions()
    options.timeout = timedelta(seconds=1)

    def run(group: ProcessGroup, rank: int) -> str:
        tensor = torch.ones(5000)
        work = allreduce_quantized([tensor], options, group) if rank == 0 else group.allreduce([tensor])
        with pytest.raises((TimeoutError, ProcessGroupError)) as failure:
            work.wait()
        return str(failure.value)

    assert "does not quantize; give should_quantize and the codec the same value in all groups" in ranks.each(run)[0]


def test_without_a_timeout_of_its_own_the_timeout_of_the_group_limits_a_collective(cohort):
    ranks = cohort(2, timeout=timedelta(seconds=1))
    work = allreduce_quantized([torch.ones(3)], ReduceOp.SUM, ranks.groups[0])  # the other rank never comes
    with pytest.raises(TimeoutError, match="timed out after 1"):
        work.wait()


def test_a_wrapper_that_swallows_errors_swallows_those_of_quantized_collectives(cohort):
    ranks = cohort(1, configured=False)
    wrapper = ErrorSwallowingProcessGroupWrapper(ranks.groups[0])
    failing = FakeProcessGroupWrapper(ProcessGroupDummy())
    failing.report_future_error(RuntimeError("on purpose"))
    with pytest.raises(RuntimeError, match="on purpose"):
        failing.compose(lambda _: None, [torch.ones(3)]).wait()

    def broken(begin: Any) -> None:
        begin("barrier", BarrierOptions())

    assert not wrapper.compose(broken, [torch.ones(3)]).wait()
    assert "not configured" in str(wrapper.error())
    assert wrapper.compose(broken, [torch.ones(3)]).wait()


def test_a_process_group_of_torch_itself_works_too():
    store = HashStore()
    results: list[torch.Tensor] = [torch.empty(0)] * 2

    def run(rank: int) -> None:
        group = dist.ProcessGroupGloo(dist.PrefixStore("x", store), rank, 2, timedelta(seconds=20))
        tensor = torch.full((700,), 1.0 + rank)
        allreduce_quantized([tensor], ReduceOp.AVG, group).wait()
        results[rank] = tensor

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    torch.testing.assert_close(results[0], torch.full((700,), 1.5), rtol=0.01, atol=0)
    assert torch.equal(results[0], results[1])
