"""Tasks that belong to one object."""

from __future__ import annotations

import asyncio

from keepstep.runtime.owned_tasks import OwnedTasks


async def test_the_error_of_a_task_is_reported():
    told: asyncio.Queue[BaseException] = asyncio.Queue()
    tasks = OwnedTasks(told.put_nowait)

    async def breaks() -> None:
        raise TypeError("a bug")

    tasks.start(breaks())
    assert repr(await asyncio.wait_for(told.get(), 20)) == "TypeError('a bug')"


async def test_close_returns_when_every_task_has_ended_and_tells_nothing_of_it():
    told: list[BaseException] = []
    ended: list[str] = []
    tasks = OwnedTasks(told.append)
    begun = asyncio.Event()

    async def lasts() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("lasts")

    tasks.start(lasts())
    await begun.wait()
    await tasks.close()
    assert (ended, told) == (["lasts"], [])
