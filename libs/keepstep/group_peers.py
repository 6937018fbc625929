"""What a group asks of another group's server."""

from __future__ import annotations

from typing import cast

import aiohttp

from keepstep.layout import first_difference
from keepstep_mesh.auth import ClientToken
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.http import connector


async def _get_json(url: str, token: str | ClientToken | None, timeout: float) -> dict[str, object]:
    limit = aiohttp.ClientTimeout(total=timeout)
    async with (
        aiohttp.ClientSession(
            connector=connector(), headers=ClientToken.of(token).peer_headers(), timeout=limit
        ) as client,
        client.get(url) as answer,
    ):
        if answer.status != 200:
            raise KeepstepError(f"{url} answered {answer.status}: {(await answer.text())[:200]}")
        return cast("dict[str, object]", await answer.json())


async def checkpoint_metadata(address: str, group_rank: int, token: str | ClientToken | None, timeout: float) -> str:
    """What the transport of ``group_rank`` of the group served at ``address`` gave for its peers."""
    try:
        return str((await _get_json(f"{address}/v1/ranks/{group_rank}/checkpoint", token, timeout))["metadata"])
    except TimeoutError:
        raise TimeoutError(f"the group server at {address} gave no answer within {timeout:g} s") from None
    except aiohttp.ClientError as error:
        raise KeepstepError(f"the group server at {address} cannot be asked for its checkpoint: {error}") from error


async def first_layout_difference(
    address: str, token: str | ClientToken | None, ours: list[str], timeout: float = 5.0
) -> str:
    """Where our parameters differ from those of the group served at ``address``, in a sentence."""
    try:
        answer = await _get_json(f"{address}/v1/layout", token, timeout)
    except (aiohttp.ClientError, KeepstepError, OSError, TimeoutError) as error:
        return f"the difference cannot be named: {address} does not answer ({str(error) or type(error).__name__})"
    lines = answer["lines"]
    return first_difference(ours, list(lines) if isinstance(lines, list) else [], str(answer["replica_id"]))
