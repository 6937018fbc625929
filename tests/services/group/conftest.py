"""A group of two ranks, and its lighthouse."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from keepstep_lighthouse.app import Lighthouse
from tests.services.group.group_driver import Group
from tests.support.services.lighthouse_driver import lighthouse as in_loop


@pytest.fixture(scope="session", autouse=True)
def scripts_start_at_once(fork_server_of_scripts: None) -> None:
    """Start peers without a wait for imports."""


@pytest.fixture
async def lighthouse() -> AsyncIterator[Lighthouse]:
    async with in_loop() as one:
        yield one


@pytest.fixture
async def pair(lighthouse) -> AsyncIterator[Group]:
    group = Group(lighthouse, 2)
    await group.start()
    yield group
    await group.close()
