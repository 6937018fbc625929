"""Jobs whose newest durable checkpoint is damaged: they resume from the one before, and say so."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from keepstep import Manager
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import read_envelope
from tests.services.manager.durable.test_durable_checkpoints import run, step
from tests.services.manager.groups import manager, place_to_meet
from tests.support.services.relay_driver import flip, make_unreadable, metric, relay_process


def state(rank: int) -> dict[str, Any]:
    return {"w": torch.full((1000,), 100.0 * rank)}


def life(
    lighthouse: str, url: str, rank: int, place: dict[str, Any], steps: int, end: threading.Barrier
) -> tuple[int, float, Manager]:
    """Return the step and the weights from which the job begins, and the Manager."""
    held = state(rank)
    how = {"durable_relays": url, "durable_every": 1, "init_sync": False, "rank": rank}
    with manager(lighthouse, "a", held, **how, **place) as one:
        one.resume()
        begins, weight = one.current_step(), held["w"][0].item()
        for _ in range(steps):
            assert step(one, held)
            one._durability._writer.finish(60)
        end.wait(60)  # rank 0 serves the others
        return begins, weight, one


async def lives(lighthouse: str, url: str, ranks: int, steps: int) -> list[Any]:
    place = place_to_meet() | {"world_size": ranks} if ranks > 1 else {}
    end = threading.Barrier(ranks)
    return await run(*(partial(life, lighthouse, url, rank, place, steps, end) for rank in range(ranks)))


def chunk_of(folder: Path, number: int, rank: int) -> Path:
    """Return the file of the chunk of a rank in the checkpoint of a step."""
    (checkpoint,) = (folder / "checkpoints" / "default").glob(f"step-{number}-*")
    (digest,) = read_envelope((checkpoint / f"manifest-{rank}").read_bytes()).chunk_digests
    return folder / "chunks" / digest.hex()[:2] / digest.hex()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:100])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip])
async def test_a_job_resumes_from_the_newest_checkpoint_that_is_whole_and_names_those_that_it_skipped(
    lighthouse: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], ranks: int
) -> None:
    disk = ("--data-dir", str(tmp_path))
    async with relay_process(*disk) as (_, url):
        await lives(lighthouse, url, ranks, 3)
    damage(chunk_of(tmp_path, 2, 0))
    damage(chunk_of(tmp_path, 3, ranks - 1))
    async with relay_process(*disk) as (_, url):
        for steps in (0, 2):  # the second life knows the damage from the relay
            for rank, (begins, weight, one) in enumerate(await lives(lighthouse, url, ranks, steps)):
                assert (begins, weight) == (1, 1.0 + 100 * rank)
                assert [text[:6] for text in one.last_checkpoint.skipped] == ["step 3", "step 2"]
                assert (one.last_checkpoint.step, one.last_checkpoint.error) == (1 + steps, "")
            assert "skipped damaged durable checkpoints" in caplog.text
            assert await metric(url, "damaged_checkpoints") == 2 - steps, "the second life uploads equal chunks again"
        for begins, _, one in await lives(lighthouse, url, ranks, 0):
            assert begins == 3, "what was trained again is newer than the damaged one"
            assert one.last_checkpoint.skipped == ()


async def test_a_job_resumes_from_the_checkpoint_before_one_that_the_disk_cannot_read(
    lighthouse: str, tmp_path: Path
) -> None:
    disk = ("--data-dir", str(tmp_path))
    async with relay_process(*disk) as (_, url):
        await lives(lighthouse, url, 1, 2)
    async with relay_process(*disk) as (_, url):
        make_unreadable(chunk_of(tmp_path, 2, 0))
        ((begins, weight, one),) = await lives(lighthouse, url, 1, 0)
        assert (begins, weight) == (1, 1.0)
        assert [text[:6] for text in one.last_checkpoint.skipped] == ["step 2"]
        assert await metric(url, "damaged_checkpoints") == 1
        assert await metric(url, 'damaged_chunks_total{where="disk"}') == 1


async def test_a_damaged_record_is_counted_and_its_checkpoint_is_named(
    lighthouse: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = ("--data-dir", str(tmp_path))
    async with relay_process(*disk) as (_, url):
        await lives(lighthouse, url, 1, 2)
    (folder,) = (tmp_path / "checkpoints" / "default").glob("step-2-*")
    (folder / "record").write_text(json.dumps({"version": 1}))
    async with relay_process(*disk) as (_, url):
        ((begins, _, _),) = await lives(lighthouse, url, 1, 0)
        assert begins == 1
        assert await metric(url, "damaged_checkpoints") == 1
        assert folder.name in next(line for line in caplog.messages if "relay cannot read checkpoints" in line)


async def test_without_a_whole_checkpoint_a_job_does_not_begin_again(lighthouse: str, tmp_path: Path) -> None:
    disk = ("--data-dir", str(tmp_path))
    async with relay_process(*disk) as (_, url):
        await lives(lighthouse, url, 1, 2)
    for number, damage in ((1, flip), (2, Path.unlink)):
        damage(chunk_of(tmp_path, number, 0))
    async with relay_process(*disk) as (_, url):
        with pytest.raises(KeepstepError, match=r"no durable checkpoint that is whole: step 2 .*step 1 .*resume=False"):
            await lives(lighthouse, url, 1, 0)


async def test_groups_of_another_number_of_ranks_skip_a_damaged_checkpoint_too(lighthouse: str, tmp_path: Path) -> None:
    def group(url: str, rank: int, place: dict[str, Any], steps: int) -> int:
        held = {"w": torch.zeros(1000)}
        how = {"durable_relays": url, "durable_every": 1, "init_sync": False, "rank": rank}
        with manager(lighthouse, "a", held, **how, **place) as one:
            one.resume()
            for _ in range(steps):
                assert step(one, held)
                one._durability._writer.finish(60)
            assert held["w"].unique().tolist() == [one.current_step()]
            return one.current_step()

    disk = ("--data-dir", str(tmp_path))
    async with relay_process(*disk) as (_, url):
        await run(*(partial(group, url, rank, place, 2) for place in (place_to_meet(),) for rank in (0, 1)))
    flip(chunk_of(tmp_path, 2, 0))
    async with relay_process(*disk) as (_, url):
        assert await asyncio.to_thread(group, url, 0, {}, 0) == 1
