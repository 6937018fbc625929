"""Copies that begin before they are asked for: right where nothing was written since, and made again elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from keepstep.state import early_copy
from keepstep.state.early_copy import EarlyCopy
from keepstep.state.pack_layout import describe
from keepstep.state.staging import MAX_BUFFERS, StagingArea
from keepstep.state.state_bytes import save_state

BIG = 300_000
"""Elements; more than ``MIN_BYTES`` of float32."""


def buffer_of(length: int) -> torch.Tensor:
    return torch.full((length,), 7, dtype=torch.uint8)


def copied(state: Any) -> EarlyCopy:
    """A copy that has ended."""
    early = EarlyCopy(5, state, buffer_of)
    early._thread.join(30)
    return early


def right(early: EarlyCopy, state: Any) -> list[int]:
    return sorted(early.right(describe(state))[1])


def test_only_what_was_not_written_to_is_right():
    state = {name: torch.ones(BIG) for name in ("kept", "added", "data", "numpy", "replaced", "half")}
    state |= {"small": torch.ones(9), "half": torch.ones(BIG, dtype=torch.bfloat16).requires_grad_()}
    early = copied(state)
    assert right(early, state) == [0, 1, 2, 3, 4], "bfloat16 of this length is small"
    state["added"][5] += 1
    state["data"].data.mul_(2)  # torch does not count it
    state["numpy"].numpy()[:] = 3
    state["replaced"] = torch.ones(BIG)
    assert right(early, state) == [0]
    state["more"] = torch.ones(BIG)
    state["kept"] = state["kept"].clone()
    assert right(early, state) == []


def test_a_write_that_torch_does_not_count_shows_in_any_byte_of_the_elements():
    state = {"data": torch.ones(1 << 20)}  # the distance of the samples is a multiple of the size of an element
    early = copied(state)
    state["data"].data.mul_(2)  # two of four bytes change
    assert right(early, state) == []


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_torch_counts_the_writes_of_optimizers(options):
    parameter = torch.nn.Parameter(torch.ones(BIG))
    optimizer = torch.optim.AdamW([parameter], **options)
    parameter.grad = torch.ones(BIG)
    optimizer.step()
    state = {"model": {"weight": parameter.detach()}, "optimizer": optimizer.state_dict()}
    early = copied(state)
    assert len(right(early, state)) == 3, "the weights and two moments"
    optimizer.step()
    assert right(early, state) == []


def test_tensors_that_share_memory_and_strided_ones_are_left_out():
    whole = torch.ones(2 * BIG)
    state = {"whole": whole, "part": whole[BIG:], "gaps": torch.ones(BIG, 2)[:, 0], "dense": torch.ones(BIG, 2).t()}
    early = copied(state)
    assert right(early, state) == [2], "transposed, and dense in memory"


def test_a_snapshot_is_that_of_the_end_whatever_was_copied_early(monkeypatch):
    monkeypatch.setattr(early_copy, "MIN_BYTES", 1)
    area = StagingArea(lambda _: None)
    state = {"a": torch.arange(100.0), "b": torch.arange(50), "text": "old"}
    for step in range(4):
        area.begin(step if step != 2 else 77, state)
        state["b"] += step
        state["text"] = "x" * step
        assert bytes(area.stage(step, state).pack) == bytes(save_state(state)[1])
        state["a"].mul_(-1)
        state[f"new {step}"] = torch.zeros(3)
    area.close()


def test_an_early_copy_takes_no_buffer_from_a_reader():
    gone: list[int] = []
    area = StagingArea(lambda snapshot: gone.append(snapshot.step))
    state = {"a": torch.ones(BIG)}
    read = []
    for step in range(MAX_BUFFERS):
        read.append(area.stage(step, state))
        assert read[-1].hold()
    area.begin(9, state)
    early = area._early
    assert early is not None
    early._thread.join(30)
    assert (early.buffer, gone) == (None, [])
    area.stage(9, state)
    assert gone == [0], "as without it: the oldest reader"
    area.close()


def test_the_next_early_copy_ends_the_last_one_and_takes_its_buffer():
    state = {"a": torch.ones(BIG)}
    area = StagingArea(lambda _: None)
    buffers = []
    for step in range(3):
        area.begin(step, state)
        early = area._early
        assert early is not None
        early._thread.join(30)
        buffers.append(early.buffer)
    assert buffers[0] is not None
    assert all(one is buffers[0] for one in buffers)
    snapshot = area.stage(2, state)
    assert snapshot.buffer is buffers[0]
    area.close()


def test_a_state_that_cannot_be_stored_fails_when_it_is_asked_for():
    area = StagingArea(lambda _: None)
    area.begin(1, {"a": object()})
    with pytest.raises(Exception, match="which a checkpoint cannot store"):
        area.stage(1, {"a": object()})
    area.close()
