"""Who may: each route lets in whom the table says."""

from __future__ import annotations

import aiohttp
import pytest
from tests.services.rest.routes import ACCESS, TOKENS, url_of

from keepstep_lighthouse.app import Lighthouse, LighthouseSettings
from keepstep_mesh.auth import Role
from keepstep_mesh.service import all_routes
from lighthouse_driver import connection, lighthouse


def test_the_table_has_every_route() -> None:
    routes = [(one.method, one.path) for one in all_routes(Lighthouse(LighthouseSettings()).service())]
    assert sorted(routes) == sorted(ACCESS)


@pytest.mark.parametrize("asker", ["nobody", "stranger", *(role.value for role in Role)])
async def test_each_route_lets_in_whom_the_table_says_and_nobody_else(asker: str) -> None:
    token = {"nobody": None, "stranger": "stranger-" * 3}.get(asker) or getattr(TOKENS, asker, None)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with lighthouse(tokens=TOKENS) as one, aiohttp.ClientSession(headers=headers) as http:
        for (method, path), roles in ACCESS.items():
            url = one.address + url_of(path)
            async with http.request(method, url) as response:
                allowed = roles == "anybody" or asker in roles.split()
                if allowed:
                    assert response.status not in (401, 403), (method, path, asker)
                else:
                    assert response.status == (403 if asker in {role.value for role in Role} else 401), (method, path)
                    assert (await response.json(content_type=None))["detail"]
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
