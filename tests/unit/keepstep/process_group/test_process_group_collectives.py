"""Every collective over Gloo, against what it should give, in the forms in which torch calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import AllreduceCoalescedOptions
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp, ReduceScatterOptions

from keepstep.process_group import ProcessGroup, ProcessGroupBabyGloo, ProcessGroupGloo
from tests.support.jobs.cohort import Cohort

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated. Please use.*_single")

COHORTS = (
    *((size, ProcessGroupGloo) for size in (1, 2, 3, 4)),
    (3, ProcessGroupBabyGloo),
)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)
REDUCE = (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT)


def name(cohort: tuple[int, type[ProcessGroup]]) -> str:
    return f"{cohort[0]} ranks of {cohort[1].__name__}"


@pytest.fixture(params=COHORTS, ids=name)
def ranks(request: pytest.FixtureRequest, cohort: Callable[..., Any]) -> Any:
    size, kind = request.param
    return cohort(size, kind=kind)


@pytest.fixture(scope="module", params=COHORTS, ids=name)
def lasting(request: pytest.FixtureRequest) -> Iterator[Any]:
    size, kind = request.param
    made = Cohort(size, kind=kind)
    made.configure()
    yield made
    made.close()


def value(rank: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + 10 * rank


def expected_sum(size: int, shape: tuple[int, ...] = (2, 3)) -> torch.Tensor:
    return sum((value(rank, shape) for rank in range(size)), torch.zeros(shape))


def sum_options(kind: type[Any]) -> Any:
    options = kind()
    options.reduceOp = ReduceOp.SUM
    options.timeout = timedelta(seconds=20)
    return options


@pytest.mark.parametrize(
    "how",
    [
        lambda group, tensor: group.allreduce([tensor]),
        lambda group, tensor: group.allreduce([tensor], sum_options(AllreduceOptions)),
        lambda group, tensor: group.allreduce([tensor], ReduceOp.SUM),
        lambda group, tensor: group.allreduce([tensor], ReduceOp(ReduceOp.SUM), timedelta(seconds=20)),
        lambda group, tensor: group.allreduce(tensor, ReduceOp.SUM),
        lambda group, tensor: group.allreduce_coalesced([tensor]),
        lambda group, tensor: group.allreduce_coalesced([tensor], sum_options(AllreduceCoalescedOptions)),
    ],
)
def test_all_reduce_sums_in_each_of_its_forms(lasting, how) -> None:
    size = len(lasting.groups)

    def run(group, rank):
        tensor = value(rank)
        assert how(group, tensor).wait()
        return tensor

    for result in lasting.each(run):
        torch.testing.assert_close(result, expected_sum(size))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    dtype=st.sampled_from(DTYPES),
    operation=st.sampled_from(REDUCE),
    seed=st.integers(0, 1000),
)
def test_all_reduce_is_the_reduction_for_any_shape_and_type(lasting, shape, dtype, operation, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    inputs = [torch.randint(0, 4, shape, generator=generator).to(dtype) for _ in lasting.groups]
    wide = torch.stack([one.to(torch.int64) for one in inputs])
    expected = {
        ReduceOp.SUM: lambda: wide.sum(0),
        ReduceOp.MAX: lambda: wide.amax(0),
        ReduceOp.MIN: lambda: wide.amin(0),
        ReduceOp.PRODUCT: lambda: wide.prod(0),
    }[operation]()

    def run(group, rank):
        tensor = inputs[rank].clone()
        group.allreduce([tensor], operation).wait()
        return tensor

    for result in lasting.each(run):
        torch.testing.assert_close(result, expected.to(dtype).reshape(shape))


def test_all_reduce_coalesced_reduces_each_tensor(lasting) -> None:
    size = len(lasting.groups)

    def run(group, rank):
        tensors = [value(rank), value(rank, (5,))]
        group.allreduce_coalesced(tensors).wait()
        return tensors

    for first, second in lasting.each(run):
        torch.testing.assert_close(first, expected_sum(size))
        torch.testing.assert_close(second, expected_sum(size, (5,)))


def test_all_gather_collects_from_every_rank_in_both_forms(lasting) -> None:
    size = len(lasting.groups)

    def run(group, rank):
        listed = [torch.zeros(2, 3) for _ in range(size)]
        group.allgather([listed], [value(rank)]).wait()
        plain = [torch.zeros(2, 3) for _ in range(size)]
        group.allgather(plain, value(rank), timedelta(seconds=20)).wait()
        return listed, plain

    for listed, plain in lasting.each(run):
        for rank in range(size):
            torch.testing.assert_close(listed[rank], value(rank))
            torch.testing.assert_close(plain[rank], value(rank))


def test_all_gather_into_tensor_concatenates(lasting) -> None:
    size = len(lasting.groups)
    expected = torch.cat([value(rank) for rank in range(size)])
    expected_flat = torch.cat([value(rank, (5,)) for rank in range(size)])

    def run(group, rank):
        outputs = [torch.zeros(2 * size, 3), torch.zeros(5 * size)]
        group.allgather_into_tensor_coalesced(outputs, [value(rank), value(rank, (5,))]).wait()
        single = torch.zeros(2 * size, 3)
        dist.all_gather_into_tensor(single, value(rank), group=group)
        return (*outputs, single)

    for first, second, single in lasting.each(run):
        torch.testing.assert_close(first, expected)
        torch.testing.assert_close(second, expected_flat)
        torch.testing.assert_close(single, expected)


@pytest.mark.parametrize("operation", [ReduceOp.SUM, ReduceOp.MAX])
def test_reduce_scatter_gives_each_rank_its_reduced_part(lasting, operation) -> None:
    size = len(lasting.groups)
    options = ReduceScatterOptions()
    options.reduceOp = operation

    def part(rank: int, of: int) -> torch.Tensor:
        return value(rank) * (of + 1)

    def run(group, rank):
        listed, plain = torch.zeros(2, 3), torch.zeros(2, 3)
        group.reduce_scatter([listed], [[part(rank, of) for of in range(size)]], options).wait()
        group.reduce_scatter(plain, [part(rank, of) for of in range(size)], operation).wait()
        return listed, plain

    for of, results in enumerate(lasting.each(run)):
        stacked = torch.stack([part(rank, of) for rank in range(size)])
        for result in results:
            torch.testing.assert_close(result, stacked.sum(0) if operation == ReduceOp.SUM else stacked.amax(0))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 4), columns=st.integers(1, 4), dtype=st.sampled_from([torch.float32, torch.int64]))
def test_reduce_scatter_of_tensors_gives_each_rank_its_rows(lasting, rows, columns, dtype) -> None:
    size = len(lasting.groups)
    shape = (rows * size, columns)

    def run(group, rank):
        outputs = [torch.zeros(rows, columns, dtype=dtype), torch.zeros(rows, dtype=dtype)]
        inputs = [value(rank, shape).to(dtype), value(rank, (rows * size,)).to(dtype)]
        group.reduce_scatter_tensor_coalesced(outputs, inputs).wait()
        single = torch.zeros(rows, columns, dtype=dtype)
        dist.reduce_scatter_tensor(single, value(rank, shape).to(dtype), group=group)
        return (*outputs, single)

    for rank, (first, second, single) in enumerate(lasting.each(run)):
        mine = slice(rank * rows, (rank + 1) * rows)
        torch.testing.assert_close(first, expected_sum(size, shape)[mine].to(dtype))
        torch.testing.assert_close(single, expected_sum(size, shape)[mine].to(dtype))
        torch.testing.assert_close(second, expected_sum(size, (rows * size,))[mine].to(dtype))


def test_all_to_all_exchanges_rows_evenly_and_by_sizes(lasting) -> None:
    size = len(lasting.groups)

    def run(group, rank):
        even = torch.zeros(size)
        group.alltoall_base(even, torch.arange(size) + 10.0 * rank, [], []).wait()
        to = [other + 1 for other in range(size)]  # so many rows to each
        rows = torch.cat([torch.full((to[other],), 10.0 * rank + other) for other in range(size)])
        uneven = torch.zeros((rank + 1) * size)
        group.alltoall_base(uneven, rows, [rank + 1] * size, to).wait()
        return even, uneven

    for rank, (even, uneven) in enumerate(lasting.each(run)):
        torch.testing.assert_close(even, torch.tensor([10.0 * source + rank for source in range(size)]))
        expected = [torch.full((rank + 1,), 10.0 * source + rank) for source in range(size)]
        torch.testing.assert_close(uneven, torch.cat(expected))


def test_broadcast_gives_the_roots_tensor_in_each_of_its_forms(lasting) -> None:
    root = len(lasting.groups) - 1
    options = BroadcastOptions()
    options.rootRank = root

    def run(group, rank):
        tensors = [value(rank) for _ in range(3)]
        group.broadcast([tensors[0]], options).wait()
        group.broadcast(tensors[1], root).wait()
        group.broadcast_one(tensors[2], root).wait()
        return tensors

    for tensors in lasting.each(run):
        for tensor in tensors:
            torch.testing.assert_close(tensor, value(root))


def test_barrier_lets_nobody_through_before_the_last(lasting) -> None:
    arrived = []

    def run(group, rank):
        arrived.append(rank)
        group.barrier().wait()
        return len(arrived)

    assert lasting.each(run) == [len(lasting.groups)] * len(lasting.groups)


def test_a_tensor_that_is_sent_is_received(lasting) -> None:
    size = len(lasting.groups)
    if size == 1:
        pytest.skip("one rank has no other to send to")

    def run(group, rank):
        received = torch.zeros(2, 3)
        sending = group.send([value(rank)], (rank + 1) % size, 7)
        group.recv([received], (rank - 1) % size, 7).wait()
        sending.wait()
        return received

    for rank, received in enumerate(lasting.each(run)):
        torch.testing.assert_close(received, value((rank - 1) % size))


def test_a_future_completes_with_the_tensors(lasting) -> None:
    size = len(lasting.groups)
    shape = (2 * size, 3)

    def run(group, rank):
        future = group.allreduce([value(rank)]).get_future()
        scattered = group.reduce_scatter_tensor_coalesced([torch.zeros(2, 3)], [value(rank, shape)]).get_future()
        waited = group.allreduce([value(rank)])
        waited.wait()
        return future.wait(), waited.get_future().wait(), scattered.wait()

    for rank, ((first,), (second,), (part,)) in enumerate(lasting.each(run)):
        torch.testing.assert_close(first, expected_sum(size))
        torch.testing.assert_close(second, expected_sum(size))
        torch.testing.assert_close(part, expected_sum(size, shape)[2 * rank : 2 * rank + 2])


def test_torchs_own_functions_take_the_group(lasting) -> None:
    size = len(lasting.groups)

    def run(group, rank):
        tensor = value(rank)
        dist.all_reduce(tensor, group=group)
        return tensor

    for result in lasting.each(run):
        torch.testing.assert_close(result, expected_sum(size))


def test_rank_and_size_are_those_of_the_configuration(lasting) -> None:
    size = len(lasting.groups)
    assert lasting.each(lambda group, _: (group.rank(), group.size())) == [(rank, size) for rank in range(size)]


def test_a_mistaken_argument_is_an_error_and_leaves_the_group_sound(ranks) -> None:
    def run(group, rank):
        with pytest.raises(RuntimeError):
            group.allreduce([torch.ones(1), torch.ones(2)]).wait()
        with pytest.raises(TypeError, match="AllreduceOptions or a plain value"):
            group.allreduce([torch.ones(1)], "sum")
        tensor = torch.ones(1)
        group.allreduce([tensor]).wait()
        return tensor.item(), group.errored()

    assert ranks.each(run) == [(len(ranks.groups), None)] * len(ranks.groups)


def test_a_group_may_live_on_ipv6(cohort) -> None:
    ranks = cohort(2, configured=False)
    ranks.configure(host="::1")

    def run(group, rank):
        tensor = value(rank)
        group.allreduce([tensor]).wait()
        return tensor

    for result in ranks.each(run):
        torch.testing.assert_close(result, expected_sum(2))
