"""Durable checkpoints of Managers at real relays: writing, failures, and what a job resumes from."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import Manager
from keepstep.checkpoint.managed import newest_checkpoint
from keepstep.runtime.exits import StateMismatchExit
from keepstep_mesh.errors import KeepstepError
from tests.services.manager.groups import SECOND, manager, place_to_meet, together, until_connected
from tests.services.manager.steps.test_first_quorum import change_policy, order, ranks_of
from tests.support.services.relay_driver import client, metric, relay, relay_process

FROZEN = 2 << 20
"""Elements that never change: 8 MiB, one chunk of them."""


def state(value: float = 0.0) -> dict[str, Any]:
    return {"frozen": torch.arange(FROZEN, dtype=torch.float32), "w": torch.full((1000,), value)}


def step(one: Manager, held: dict[str, Any]) -> bool:
    """One step of an optimizer: the average of the groups, which all contribute 1."""
    one.start_quorum()
    gradient = torch.ones(1000)
    one.allreduce(gradient).wait()
    committed = one.should_commit()
    if committed:
        held["w"] += gradient
    return committed


def train(lighthouse: str, url: str, name: str, steps: int, **options: Any) -> tuple[int, float, Any]:
    """Return the step before the first one, the weights at the end, and what the Manager knows of its checkpoints."""
    held = state()
    with manager(lighthouse, name, held, durable_relays=url, init_sync=False, **options) as one:
        first = None
        while one.current_step() < steps:
            one.start_quorum()
            first = one.current_step() if first is None else first
            step(one, held)
        one.shutdown()
        assert held["w"].unique().numel() == 1
        return first or 0, held["w"][0].item(), one.last_checkpoint


async def run(*groups: Callable[[], Any]) -> list[Any]:
    return await asyncio.to_thread(together, *groups)


async def listed(url: str) -> dict[int, str]:
    async with client(url, job="default") as one:
        return {view["step"]: view["state"] for view in (await one.call("GET", one.checkpoints))["checkpoints"]}


async def test_a_job_whose_groups_are_gone_resumes_from_the_newest_on_another_number_of_groups(
    lighthouse: str, tmp_path: Path
) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        two = [partial(train, lighthouse, url, name, 5, durable_every=2, min_replica_size=2) for name in "ab"]
        for first, weight, last in await run(*two):
            assert (first, weight) == (0, 5.0)
            assert (last.step, last.error, last.relays) == (4, "", (url,))
        assert await listed(url) == {2: "committed", 4: "committed"}
        assert await metric(url, "received_bytes_total") < 1.2 * 4 * FROZEN, "what is frozen travels once"
        three = [partial(train, lighthouse, url, name, 8, durable_every=2, min_replica_size=3) for name in "cde"]
        for first, weight, last in await run(*three):
            assert (first, weight, last.step) == (4, 8.0, 8), "the last one is written at the end"


async def test_a_group_that_joins_a_live_job_heals_and_loads_no_checkpoint(lighthouse: str, tmp_path: Path) -> None:
    def both(url: str) -> None:
        ours, theirs = state(), state(-1.0)
        how = {"durable_relays": url, "durable_every": 1, "init_sync": False}
        with manager(lighthouse, "a", ours, **how) as a:
            for _ in range(3):
                assert step(a, ours)
            with manager(lighthouse, "b", theirs, **how) as b:
                assert not b.resume()
                assert b.current_step() == 0

                def with_b() -> bool:
                    until_connected(lighthouse, "b", asked=True)
                    return step(a, ours)

                together(with_b, lambda: step(b, theirs))
                assert b.current_step() == a.current_step() == 4
                assert theirs["w"][0] == ours["w"][0] == 4.0

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await asyncio.to_thread(both, url)


async def test_groups_load_it_in_the_first_quorum_if_the_group_with_the_live_state_is_gone_by_then(
    lighthouse: str, tmp_path: Path
) -> None:
    def job(url: str) -> None:
        ours, theirs = state(), state(-1.0)
        how = {"durable_relays": url, "durable_every": 1}
        with manager(lighthouse, "a", ours, **how) as a, manager(lighthouse, "b", theirs, **how) as b:
            for _ in range(3):
                together(lambda: step(a, ours), lambda: step(b, theirs))
            a.shutdown()
            with manager(lighthouse, "c", other := state(-2.0), **how) as c:
                b.shutdown()  # after the lighthouse named its live state to c
                c.start_quorum()
                assert c.current_step() == 3
                assert other["w"][0] == 3.0

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await asyncio.to_thread(job, url)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_spare_that_is_left_alone_loads_the_newest_one_although_there_was_none_when_it_came(
    lighthouse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    """With ``refuse_going_back`` its first request is denied, to all its ranks."""
    monkeypatch.setenv("NUM_REPLICA_GROUPS", "2")
    monkeypatch.setenv("KEEPSTEP_SPARES", "1")

    def job(url: str) -> None:
        how = {"durable_relays": url, "durable_every": 1}
        quorum, written, ended = (threading.Barrier(count) for count in (2 * ranks, ranks, ranks))

        def spare(**place: Any) -> tuple[int, float]:
            quorum.wait(60)
            with manager(lighthouse, "b", held := state(-1.0), **how, **place) as b:
                assert step(b, held)
                ended.wait(60)
                return b.current_step(), held["w"][0].item()

        def only_group(**place: Any) -> None:
            with manager(lighthouse, "a", ours := state(), **how, **place) as a:
                a.start_quorum()
                quorum.wait(60)
                until_connected(lighthouse, "b", asked=True)
                for _ in range(3):
                    assert step(a, ours)
                a.save_checkpoint()
                assert a._durability._writer.finish(60)
                if written.wait(60) == 0:
                    change_policy(lighthouse, refuse_going_back=ranks > 1)
                    order(lighthouse, "a/evict")
                written.wait(60)

        ends = together(*ranks_of(ranks, only_group), *ranks_of(ranks, spare))
        assert ends[ranks:] == [(4, 4.0)] * ranks

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await asyncio.to_thread(job, url)


async def test_no_job_begins_again_while_the_relay_that_may_have_its_checkpoint_does_not_answer(
    lighthouse: str,
) -> None:
    away = "http://127.0.0.1:1"

    def job() -> None:
        how = {"durable_relays": away, "durable_every": 1, "timeout": SECOND}
        refused = pytest.raises(KeepstepError, match=r"cannot find out whether job default has .*resume=False")
        with manager(lighthouse, "a", state(), connect_timeout=SECOND, **how) as one, refused:
            one.start_quorum()
        with manager(lighthouse, "b", held := state(), resume=False, **how) as one:
            assert step(one, held)
            one.start_quorum()
            one._durability._writer.finish(60)
            assert step(one, held), "a failed write stops no training"
            assert one.last_checkpoint.error_step == 1
            assert away in one.save_checkpoint().error

    await asyncio.to_thread(job)


async def test_a_job_waits_for_the_relay_that_has_its_checkpoint_although_another_one_is_there_before(
    lighthouse: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask = threading.Event(), newest_checkpoint._ask

    def ask_and_tell(*relays: Any) -> Any:
        answers = ask(*relays)
        asked.set()
        return answers

    def life(steps: int) -> int:
        held = state()
        with manager(lighthouse, "a", held, durable_every=1, init_sync=False) as one:
            one.resume()
            first = one.current_step()
            while one.current_step() < steps:
                assert step(one, held)
                assert one._durability._writer.finish(60)
            return first

    @asynccontextmanager
    async def registered(name: str) -> AsyncIterator[None]:
        async with relay(name=name, data_dir=tmp_path / name, lighthouses=(lighthouse,)) as one:
            while not one.is_registered:  # noqa: ASYNC110 - nothing tells it
                await asyncio.sleep(0.01)
            yield

    async with asyncio.timeout(120):
        async with registered("r1"):
            assert await asyncio.to_thread(life, 3) == 0
        async with registered("r2"):
            monkeypatch.setattr(newest_checkpoint, "_ask", ask_and_tell)
            again = asyncio.create_task(asyncio.to_thread(life, 4))
            await asyncio.to_thread(asked.wait, 60)
            async with registered("r1"):
                assert await again == 3


async def test_a_checkpoint_with_a_state_that_the_script_does_not_have_ends_the_group_with_the_remedy(
    lighthouse: str, tmp_path: Path
) -> None:
    def life(url: str, *, second: bool) -> None:
        held, later = state(), {"w": torch.zeros(1)}
        with manager(lighthouse, "a", held, durable_relays=url, durable_every=1) as one:
            if second:
                one.register_state_dict_fn("second", later.update, lambda: dict(later))
            assert step(one, held)
            one.save_checkpoint()
            one._durability._writer.finish(60)

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        await asyncio.to_thread(life, url, second=True)
        with pytest.raises(StateMismatchExit, match=r"the states \['default', 'second'\].*before its first"):
            await asyncio.to_thread(life, url, second=False)
        await asyncio.to_thread(life, url, second=True)
        assert max(await listed(url)) == 2


async def test_all_ranks_of_a_group_resume_from_one_checkpoint_and_all_learn_that_a_write_failed(
    lighthouse: str, tmp_path: Path
) -> None:
    def rank(number: int, place: dict[str, Any], url: str, value: Any) -> tuple[int, float, str, int]:
        held = state(float(number))
        how = {"durable_relays": url, "durable_every": 1, "rank": number, "init_sync": False}
        with manager(lighthouse, "a", held, **how, **place) as one:
            one.resume()
            first = one.current_step()
            step(one, held)
            if number == 1:
                held["value"] = value
            step(one, held)
            one._durability._writer.finish(60)
            last = one.last_checkpoint
            assert not last.uploading
            return first, held["w"][0].item() - number, last.error, last.step

    async with relay_process("--data-dir", str(tmp_path)) as (_, url):
        place = place_to_meet()
        first = await run(*(partial(rank, number, place, url, 1.0) for number in (0, 1)))
        assert [one[:2] for one in first] == [(0, 2.0), (0, 2.0)]
        assert await listed(url) == {1: "committed", 2: "committed"}
        place = place_to_meet()
        second = await run(*(partial(rank, number, place, url, object()) for number in (0, 1)))
        assert [one[:2] for one in second] == [(2, 4.0), (2, 4.0)]
        assert all("state['user']['default']['value']" in one[2] for one in second), "on the rank without it too"
        assert await listed(url) == {1: "committed", 2: "committed"}
