"""A job of many groups: the sizes of answers, and long work in turns with other tasks."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import msgpack
import pytest

from keepstep_mesh.serving.openapi import json_text, plain
from keepstep_metrics.api import job_views, span_views, stream, turns
from keepstep_metrics.history.work import whole
from keepstep_metrics.lighthouse.live_status import NOTHING
from keepstep_metrics.storage.event_store import _packed
from tests.support.models.operations import operations
from tests.unit.keepstep_metrics.history.job_driver import T, World, joined

SPAN = T, T + 100


def of_groups(count: int) -> World:
    names = [f"g{number}:1" for number in range(count)]
    world = joined(*names)
    for name in names:
        world.steps(name, 10, 70, 0.5, values={"loss": 2.0})
    return world


@pytest.fixture(scope="module")
def many() -> World:
    return of_groups(40)


def test_a_job_of_many_groups_has_columns_of_the_groups_that_are_asked_for(many) -> None:
    told = span_views.steps(many.job, *SPAN, 10, T + 100)
    assert told.seconds == {}
    assert told.group_values == {"loss": {}}
    assert told.committed_per_second[3] == pytest.approx(2)
    one = span_views.steps(many.job, *SPAN, 10, T + 100, names=["g7", "nobody"])
    assert [*one.seconds] == [*one.group_values["loss"]] == ["g7"]


def test_steps_of_many_groups_cost_as_much_as_those_of_few(many) -> None:
    few = of_groups(10)
    costs = [operations(lambda job=one.job: span_views.steps(job, *SPAN, 10, T + 100)) for one in (few, many)]
    assert costs[1] < 1.1 * costs[0]


def test_an_answer_that_is_encoded_in_pieces_is_the_same(many) -> None:
    for view in (
        whole(span_views.timeline(many.job, *SPAN, 100)),
        whole(span_views.goodput(many.job, *SPAN)),
        whole(job_views.jobs_view([many.job], T + 100)),
        job_views.now_view(many.job, NOTHING, T + 100),
    ):
        assert json.loads(whole(turns.encoding(view))) == json.loads(json_text(view)) == plain(view)


@dataclass(frozen=True)
class Odd:
    value: float
    empty: tuple[int, ...]
    names: dict[int, float]


def test_values_that_json_does_not_know_are_null_and_keys_are_text() -> None:
    odd = Odd(float("nan"), (), {1: float("inf"), 2: 0.5})
    assert json.loads(whole(turns.encoding(odd))) == {"value": None, "empty": [], "names": {"1": None, "2": 0.5}}


async def test_other_tasks_run_between_the_pieces_of_long_work(monkeypatch, many) -> None:
    monkeypatch.setattr(turns, "LOOP_TURN_SECONDS", 0.0)
    passes = 0

    async def other() -> None:
        nonlocal passes
        while True:
            passes += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    dumped = await turns.in_turns(many.core.dumping())
    task.cancel()
    await asyncio.wait([task])
    assert passes >= 40
    assert dumped == many.core.dump()


def test_a_snapshot_that_is_packed_in_pieces_is_the_same(many) -> None:
    dumped = many.core.dump()
    assert msgpack.unpackb(_packed(dumped), strict_map_key=False) == msgpack.unpackb(
        msgpack.packb(dumped), strict_map_key=False
    )


def test_a_large_job_is_streamed_less_often() -> None:
    world = joined("a:1")
    assert stream.pause(None) == stream.pause(world.job) == stream.NOW_SECONDS
    for number in range(999):
        world.job.group(f"g{number}:1")
    assert stream.pause(world.job) == 1.0
