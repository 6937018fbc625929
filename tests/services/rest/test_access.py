"""Access: each route admits the roles of the table."""

from __future__ import annotations

import aiohttp
import pytest

from keepstep_lighthouse.app import Lighthouse, LighthouseSettings
from keepstep_mesh.serving.service import all_routes
from tests.services.rest.routes import ACCESS, url_of
from tests.support.services.access_table import ASKERS, TOKENS, check_access
from tests.support.services.lighthouse_driver import connection, lighthouse


def test_the_table_has_every_route() -> None:
    routes = [(one.method, one.path) for one in all_routes(Lighthouse(LighthouseSettings()).service())]
    assert sorted(routes) == sorted(ACCESS)


@pytest.mark.parametrize("asker", ASKERS)
async def test_each_route_lets_in_whom_the_table_says_and_nobody_else(asker: str) -> None:
    async with lighthouse(tokens=TOKENS) as one:
        await check_access(ACCESS, asker, one.address, url_of)
        assert not one.jobs


async def test_a_session_needs_the_token_before_it_is_upgraded() -> None:
    async with lighthouse(tokens=TOKENS) as one:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connection(one.address, Authorization="Bearer wrong-wrong-wrong-wrong"):
                pass
        assert refused.value.status == 401
        async with connection(one.address, Authorization=f"Bearer {TOKENS.worker}") as fine:
            await fine.hello()
            await fine.message()
