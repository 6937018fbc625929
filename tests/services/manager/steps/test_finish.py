"""Groups that finish together have one final state, and the job is closed at it."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import Finished, Manager
from keepstep.runtime.exits import JobClosedExit, MismatchExit
from tests.services.manager.groups import SECOND, manager, place_to_meet, together
from tests.services.manager.steps.test_starts import job
from tests.support.services.relay_driver import relay_process

LAST = 3


def train(one: Manager, weights: dict[str, Any], last: int = LAST, *, allow_heal: bool = True) -> None:
    """Train to step ``last``, as a script does. The weights depend on the groups that took part in each step."""
    while one.current_step() < last:
        one.start_quorum(allow_heal=allow_heal)
        gradient = torch.full((4,), float(len(one.replica_id())) + one.current_step())
        one.allreduce(gradient).wait()
        if one.should_commit():
            weights["w"] = weights["w"] * 2 + gradient


def group(
    lighthouse: str,
    name: str,
    *,
    last: int = LAST,
    publish: bool = False,
    ready: threading.Barrier | None = None,
    **options: Any,
) -> tuple[Finished, torch.Tensor]:
    weights = {"w": torch.zeros(4)}
    with manager(lighthouse, name, weights, **options) as one:
        if ready is not None:
            ready.wait(60)  # the first quorum waits for all that are connected
        train(one, weights, last)
        return one.finish(publish=publish), weights["w"]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_group_that_comes_while_the_others_finish_ends_with_their_weights(
    lighthouse: str, asynchronous: bool
) -> None:
    ready, trained, came = threading.Barrier(2), threading.Barrier(3), threading.Barrier(3)

    def first(name: str) -> tuple[Finished, torch.Tensor]:
        weights = {"w": torch.zeros(4)}
        with manager(lighthouse, name, weights, use_async_quorum=asynchronous) as one:
            ready.wait(60)  # else one may train alone, and the other waits for it
            train(one, weights)
            trained.wait(60)
            came.wait(60)  # else the two finish without the third, which they do not know
            ended = one.finish()
            assert one.finish() is ended
            with pytest.raises(RuntimeError, match="no step follows"):
                one.start_quorum()
            return ended, weights["w"]

    def late() -> tuple[Finished, torch.Tensor]:
        trained.wait(60)
        with manager(lighthouse, "c-is-late", weights := {"w": torch.ones(4)}, use_async_quorum=asynchronous) as one:
            came.wait(60)
            train(one, weights, allow_heal=asynchronous)  # where groups finish, it heals in any case
            return one.finish(), weights["w"]

    results = together(lambda: first("a"), lambda: first("b"), late)
    assert {ended for ended, _ in results} == {Finished(LAST, 3)}
    assert all(torch.equal(weights, results[0][1]) for _, weights in results)
    state = job(lighthouse)["state"]
    assert (state["code"], state["step"]) == ("closed", LAST)

    with manager(lighthouse, "a") as again, pytest.raises(JobClosedExit, match="3 groups finished together") as closed:
        again.start_quorum()
        again.wait_quorum()
    assert closed.value.code == 80


async def test_a_group_that_comes_after_the_end_takes_a_published_final_state_from_a_relay(
    lighthouse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(ready: threading.Barrier, name: str, **options: Any) -> tuple[Finished, torch.Tensor]:
        with manager(lighthouse, name, weights := {"w": torch.zeros(4)}, **options) as one:
            ready.wait(60)  # the first quorum waits for all that are connected
            train(one, weights)
            return one.finish(publish=True), weights["w"]

    def late(name: str, **options: Any) -> tuple[Finished, torch.Tensor]:
        with manager(lighthouse, name, weights := {"w": torch.ones(4)}, **options) as one:
            train(one, weights)
            return one.finish(), weights["w"]

    def refused(name: str, **options: Any) -> str:
        with pytest.raises(JobClosedExit) as closed:
            late(name, **options)
        return str(closed.value)

    async with relay_process("--data-dir", str(tmp_path / "relay")) as (_, url):
        at: dict[str, Any] = {
            "durable_relays": url,
            "init_sync": False,
        }  # the late group learns of the end in its first all-reduce
        ready = threading.Barrier(2)
        both = (partial(finish, ready, name, **at) for name in "ab")
        (end, weights), other = await asyncio.to_thread(together, *both)
        assert end == other[0] == Finished(LAST, 2)
        again, loaded = await asyncio.to_thread(late, "b", **at)
        assert again == end
        assert torch.equal(loaded, weights)
        said = await asyncio.to_thread(refused, "d", resume=False, **at)
        assert "2 groups finished together at step 3" in said
        assert "the final state was not loaded: resume=False" in said

        monkeypatch.setenv("KEEPSTEP_JOB", "resumed")  # the late group resumes from the final state before it asks
        at["durable_every"] = LAST
        both = (partial(finish, ready, name, **at) for name in "ab")
        (end, weights), _ = await asyncio.to_thread(together, *both)
        again, loaded = await asyncio.to_thread(late, "b", **at)
        assert again == end
        assert torch.equal(loaded, weights)

        monkeypatch.setenv("KEEPSTEP_JOB", "not-published")
        at["durable_every"] = LAST - 1
        await asyncio.to_thread(group, lighthouse, "a", **at)
        said = await asyncio.to_thread(refused, "b", **at)
        assert f"another state, of step {LAST - 1}" in said, "of the durable checkpoint"
        assert "no relay has it" in said
    monkeypatch.delenv("KEEPSTEP_JOB")
    del at["durable_every"]
    said = await asyncio.to_thread(refused, "d", **at)
    assert f"no relay has it; finish(publish=True) in all groups stores it there; cannot connect to {url}" in said


def test_the_ranks_of_a_group_finish_together(lighthouse: str) -> None:
    ranks = [(name, rank, place) for name, place in (("a", place_to_meet()), ("b", place_to_meet())) for rank in (0, 1)]
    ready = threading.Barrier(len(ranks))
    ends = together(*(partial(group, lighthouse, name, rank=rank, ready=ready, **place) for name, rank, place in ranks))
    assert [end for end, _ in ends] == [Finished(LAST, 2)] * 4


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"last": LAST - 1}, f"c finished at step {LAST - 1}, and a, b continued after step {LAST - 1}"),
        ({"publish": False}, "a, b called finish(publish=True), and c called finish() without publish; give all"),
    ],
)
def test_a_group_that_ends_otherwise_is_refused_and_the_others_finish(
    lighthouse: str, options: dict[str, Any], why: str
) -> None:
    ready = threading.Barrier(3)

    def otherwise() -> str:
        with pytest.raises(MismatchExit) as refused:
            group(lighthouse, "c", ready=ready, **{"publish": True, **options})
        return str(refused.value)

    a, b, message = together(*(partial(group, lighthouse, name, publish=True, ready=ready) for name in "ab"), otherwise)
    assert why in message
    assert a[0] == b[0] == Finished(LAST, 2)


def test_a_wait_that_takes_too_long_says_what_it_waits_for_and_can_go_on(lighthouse: str) -> None:
    both, tried = threading.Barrier(2), threading.Event()

    def impatient() -> Finished:
        with manager(lighthouse, "a", weights := {"w": torch.zeros(4)}) as one:
            both.wait(30)
            train(one, weights)
            with pytest.raises(TimeoutError, match=r"b:.* is connected but has not asked"):
                one.finish(SECOND / 10)  # any wait is too short: b waits for this error
            tried.set()
            return one.finish()

    def slow() -> Finished:
        with manager(lighthouse, "b", weights := {"w": torch.zeros(4)}) as one:
            both.wait(30)
            train(one, weights)
            assert tried.wait(30)
            return one.finish()

    assert together(impatient, slow) == [Finished(LAST, 2)] * 2
