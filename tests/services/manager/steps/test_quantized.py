"""Quantized reductions under a Manager: who contributes, what is averaged, and what is refused."""

from __future__ import annotations

import math
import threading
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

from keepstep import ProcessGroupGloo, WorldSizeMode
from keepstep.collectives import allreduce_quantized, reduce_scatter_quantized
from keepstep.collectives.codecs import TopK
from keepstep.process_group import ManagedProcessGroup, ProcessGroupError
from tests.services.manager.groups import SECOND, manager, together

SPARES = {"world_size_mode": WorldSizeMode.FIXED_WITH_SPARES, "min_replica_size": 2}


class Counting(ProcessGroupGloo):
    """Lists the collectives that it begins."""

    def __init__(self) -> None:
        super().__init__(timeout=20 * SECOND)
        self.began: list[str] = []

    def _run(self, operation: str, *args: Any) -> Any:
        self.began.append(operation)
        return super()._run(operation, *args)


def test_of_three_groups_one_spare_all_get_the_same_average_of_the_two_that_take_part(lighthouse):
    ready = threading.Barrier(3)
    gradients = {name: torch.randn(3, 1001) for name in "abc"}

    def group(name: str) -> tuple[Any, ...]:
        pg = Counting()
        with manager(lighthouse, name, pg=pg, **SPARES) as m:
            ready.wait(30)
            m.start_quorum()
            total, plain = gradients[name].clone(), torch.ones(2)
            quantized = m.allreduce(total, should_quantize=True)
            m.allreduce(plain)  # begins after all collectives of the first one
            half = torch.full((9,), 6e4, dtype=torch.float16)
            through = allreduce_quantized([half], ReduceOp.AVG, ManagedProcessGroup(m))
            with pytest.raises(ProcessGroupError, match="not supported by ManagedProcessGroup"):
                reduce_scatter_quantized(torch.zeros(5), [half], ReduceOp.AVG, ManagedProcessGroup(m))
            assert quantized.wait()
            assert through.wait()
            assert quantized.get_future().wait() is total
            ready.wait(30)
            took_part = m.is_participating()
            assert m.should_commit()
            return name, took_part, total, plain, half, pg.began

    results = together(*(lambda name=name: group(name) for name in "abc"))
    expected = sum(gradients[name] for name, took_part, *_ in results if took_part) / 2
    for _, _, total, plain, half, began in results:
        assert torch.equal(total, results[0][2])
        assert (total - expected).norm() <= 0.02 * expected.norm()
        assert plain.tolist() == [1.0, 1.0]
        assert half.tolist() == [60000.0] * 9  # a sum of them would be infinite
        assert began == ["alltoall_base", "_allgather_base", "allreduce", "alltoall_base", "_allgather_base"]


def test_tensors_of_inference_mode_are_averaged(lighthouse):
    """Such as the loss of an evaluation."""
    ready = threading.Barrier(2)

    def group(name: str) -> list[float]:
        with manager(lighthouse, name, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            with torch.inference_mode():
                value = torch.full((2, 300), float(ord(name)))
                losses = [value.clone() for _ in range(2)] + [value.clone().t() for _ in range(2)]
                works = [m.allreduce(one, should_quantize=number % 2 > 0) for number, one in enumerate(losses)]
                assert all(work.wait() for work in works), m.errored()
            assert m.should_commit()
            return [one.mean().item() for one in losses]

    for averages in together(lambda: group("a"), lambda: group("c")):
        assert averages == pytest.approx([ord("b")] * 4, rel=0.01)


def test_a_reduction_that_cannot_be_quantized_is_refused_rather_than_sent_in_full_precision(lighthouse):
    with manager(lighthouse, "a") as m:
        m.start_quorum()
        for tensor, reduce_op, message in (
            (torch.ones(3, dtype=torch.int64), ReduceOp.SUM, "cannot quantize a tensor of torch.int64"),
            (torch.ones(3, dtype=torch.complex64), ReduceOp.AVG, "cannot quantize a tensor of torch.complex64"),
            (torch.ones(3), ReduceOp.MAX, "expected ReduceOp.SUM or ReduceOp.AVG"),
        ):
            with pytest.raises(ValueError, match=message):
                m.allreduce(tensor, should_quantize=True, reduce_op=reduce_op)
        assert m.should_commit()


def test_a_nan_of_one_group_is_refused_in_all_also_when_it_is_quantized(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> tuple[bool, str]:
        with manager(lighthouse, name, min_replica_size=2, refuse_nonfinite=True) as m:
            ready.wait(30)
            m.start_quorum()
            m.allreduce(torch.tensor([1.0, value]), should_quantize=True)
            committed = m.should_commit()
            error = str(m.errored())
            ready.wait(30)
            return committed, error

    first, second = together(lambda: group("a", math.nan), lambda: group("b", 1.0))
    assert (first[0], second[0]) == (False, False)
    assert "NaN or an infinity: this group" in first[1]
    assert "NaN or an infinity: another group" in second[1]


def test_a_codec_averages_under_a_manager_and_its_step_commits(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, value: float) -> tuple[bool, list[float], list[float]]:
        codec = TopK(1 / 4096)  # one element of each row
        with manager(lighthouse, name, min_replica_size=2) as m:
            ready.wait(30)
            m.start_quorum()
            change = torch.tensor([value, 1.0])
            assert codec.allreduce(m, "all", [change]).wait()
            committed = m.should_commit()
            codec.settle("all", committed)
            ready.wait(30)
            return committed, change.tolist(), codec.error("all")[0].tolist()

    results = together(lambda: group("a", 8.0), lambda: group("b", 4.0))
    assert results == [(True, [6.0, 0.0], [0.0, 1.0])] * 2


def test_groups_of_which_one_does_not_quantize_end_with_a_reason_that_names_them(lighthouse):
    ready = threading.Barrier(2)

    def group(name: str, quantize: bool) -> str:
        with manager(lighthouse, name, {"w": torch.zeros(1)}, min_replica_size=2, timeout=SECOND) as m:
            ready.wait(30)
            try:
                for _ in range(5):
                    m.start_quorum()
                    m.allreduce(torch.ones(4), should_quantize=quantize)
                    assert not m.should_commit()
            except SystemExit as end:
                return str(end)
        return "went on"

    for reason in together(lambda: group("a", True), lambda: group("b", False)):
        assert "not all groups quantize: in the step after step 0, a:" in reason
        assert "give should_quantize and the codec the same value in all groups" in reason
