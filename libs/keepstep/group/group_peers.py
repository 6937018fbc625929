"""Requests to the server of another group."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import aiohttp

from keepstep.group.agreement import first_difference, values_difference
from keepstep_mesh.errors import AuthError, KeepstepError
from keepstep_mesh.net.http import Problem, client_session, raise_for_problem, read_json_answer
from keepstep_mesh.protocol.membership import differ
from keepstep_mesh.protocol.names import MAX_REPLICA_ID, name_of
from keepstep_mesh.security.tokens import ClientToken

MAX_LAYOUT_BYTES = 16 << 20
MAX_METADATA_BYTES = 1 << 20
MAX_LINE_CHARACTERS = 500
"""Limit for a line of a layout in an error."""


async def _get_json(url: str, token: str | ClientToken | None, timeout: float, max_bytes: int) -> dict[str, Any]:
    async with (
        client_session(timeout=timeout) as client,
        client.get(url, headers=ClientToken.of(token).peer_headers(), allow_redirects=False) as answer,
    ):
        try:
            await raise_for_problem(answer)
            return await read_json_answer(answer, max_bytes)
        except (Problem, AuthError) as error:
            status = "" if answer.status == HTTPStatus.OK else f"{url} answered {answer.status}: "
            raise KeepstepError(f"{status}{str(error)[:200]}") from error


async def checkpoint_metadata(address: str, group_rank: int, token: str | ClientToken | None, timeout: float) -> str:
    """Return the metadata that a transport needs to fetch the state of a rank.

    Args:
        address: of the other group's server.
        group_rank: of the rank within the other group.
        token: of the job.
        timeout: in seconds.

    Raises:
        TimeoutError: the server did not answer in time.
        KeepstepError: the server cannot be reached, or has no metadata.
    """
    try:
        url = f"{address}/v1/ranks/{group_rank}/checkpoint"
        return str((await _get_json(url, token, timeout, MAX_METADATA_BYTES))["metadata"])
    except KeyError:
        raise KeepstepError(
            f"the answer of the group server at {address} has no metadata; is it another version of keepstep?"
        ) from None
    except TimeoutError:
        raise TimeoutError(f"the group server at {address} did not answer within {timeout:g} s") from None
    except aiohttp.ClientError as error:
        raise KeepstepError(f"the group server at {address} cannot be reached: {error}") from error


async def first_values_difference(
    address: str,
    token: str | ClientToken | None,
    values: dict[str, dict[str, str]],
    timeout: float = 5.0,
    rank: int = 0,
) -> str:
    """Describe the first difference from the same rank of the group at ``address`` in the values of the last steps.

    Does not raise. Empty: none is known.
    """
    try:
        answer = await _get_json(f"{address}/v1/layout?rank={rank}", token, timeout, MAX_LAYOUT_BYTES)
    except (aiohttp.ClientError, KeepstepError, OSError, TimeoutError):
        return ""
    return values_difference(values, answer.get("values"), _name(answer))


async def told_values(
    address: str, token: str | ClientToken | None, rank: int, timeout: float
) -> dict[str, dict[str, str]]:
    """Return the values of the last steps of a rank of the group at ``address``, as ``StepValues.lines`` does.

    Does not raise. Empty: they are not known.
    """
    try:
        answer = await _get_json(f"{address}/v1/layout?part=values&rank={rank}", token, timeout, MAX_LAYOUT_BYTES)
    except (aiohttp.ClientError, KeepstepError, OSError, TimeoutError):
        return {}
    steps = answer.get("values")
    return {
        str(step): {str(name): str(text) for name, text in named.items()}
        for step, named in (steps if isinstance(steps, dict) else {}).items()
        if isinstance(named, dict)
    }


async def first_layout_difference(
    address: str,
    token: str | ClientToken | None,
    ours: list[str],
    *,
    settings: str = "",
    values: dict[str, dict[str, str]] | None = None,
    timeout: float = 5.0,
    rank: int = 0,
) -> tuple[list[str], str, bool]:
    """Return the layout of a rank of the group at ``address``, and the first difference from it. Does not raise.

    Args:
        rank: in both groups.
        values: of the last steps of this rank; they are compared if parameters and settings are equal.

    Returns:
        Its lines, empty if they or the settings do not fit; the first difference in parameters or settings; and whether
        its lines have changed since its first step.
    """
    try:
        answer = await _get_json(f"{address}/v1/layout?rank={rank}", token, timeout, MAX_LAYOUT_BYTES)
    except (aiohttp.ClientError, KeepstepError, OSError, TimeoutError) as error:
        told = f"the difference is unknown: {address} does not answer ({str(error) or type(error).__name__})"
        return [], told, False
    lines = answer.get("lines")
    whole = [str(line) for line in lines] if isinstance(lines, list) else []
    theirs, cut = ([line[:MAX_LINE_CHARACTERS] for line in one] for one in (whole, ours))
    their_settings, peer = str(answer.get("settings", "")), _name(answer)
    equal = (settings, cut) == (their_settings, theirs)
    difference = values_difference(values or {}, answer.get("values"), peer) if equal else ""
    difference = difference or first_difference(settings, cut, their_settings, theirs, peer, rank)
    return [] if differ(settings, their_settings) else whole, difference, answer.get("changed") is True


def _name(answer: dict[str, Any]) -> str:
    return name_of(str(answer.get("replica_id")))[:MAX_REPLICA_ID]
