"""The end of a task."""

from __future__ import annotations

import asyncio

import pytest

from keepstep_mesh.net.event_loop import cancelled


async def test_a_cancelled_task_has_cleaned_up() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cancelled(task)
    assert ended == [True]


async def test_the_error_of_a_task_that_had_failed_is_raised() -> None:
    async def fail() -> None:
        raise ValueError("planted")

    task = asyncio.create_task(fail())
    await asyncio.wait([task])
    with pytest.raises(ValueError, match="planted"):
        await cancelled(task)
