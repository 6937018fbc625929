"""The lighthouse's REST surface as the command uses it: fails over, and turns every failure into advice."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from keepstep_cli.errors import Refused, Unreachable
from keepstep_cli.options import DEFAULT_LIGHTHOUSE

if TYPE_CHECKING:
    import aiohttp

    from keepstep_mesh.auth import ClientToken
    from keepstep_mesh.tls import TlsFiles

TIMEOUT_SECONDS = 10.0


def read_token(token_file: Path | None) -> ClientToken:
    """The token in the file of the flag, else that of the environment, if there is one."""
    from keepstep_mesh.auth import ClientToken
    from keepstep_mesh.errors import AuthError

    environment = os.environ if token_file is None else {"KEEPSTEP_TOKEN_FILE": str(token_file)}
    try:
        return ClientToken(environment)
    except AuthError as error:
        raise click.UsageError(str(error)) from error


class Lighthouse:
    """Whichever of ``addresses`` (comma separated) answers within ``timeout`` seconds. Paths are below /v1."""

    what = "lighthouse"
    default: str | None = DEFAULT_LIGHTHOUSE
    advice = "Start one with `keepstep up`, or say where it is with --lighthouse or KEEPSTEP_LIGHTHOUSE."

    def __init__(
        self,
        addresses: str | None,
        token: ClientToken | None,
        tls: TlsFiles | None = None,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        from keepstep_mesh.settings import split_addresses

        try:
            self._addresses = split_addresses(addresses or self.default or "")
        except ValueError as error:
            raise click.UsageError(f"--{self.what}: {error}") from error
        self._token = token
        self._tls = tls
        self._timeout = timeout

    async def get(self, *path: str, **query: int) -> Any:
        async with self._answer("GET", path, self._timeout, params=query) as answer:
            return await answer.json()

    async def read(self, *path: str, limit: int, **query: int) -> bytes:
        """The answer as bytes. ``Refused`` when there are more than ``limit``."""
        async with self._answer("GET", path, None, params=query) as answer:
            length = answer.content_length
            if length is None or length > limit:
                raise Refused(f"{answer.url} answers with {length} bytes; at most {limit} are taken")
            return await answer.read()

    async def delete(self, *path: str) -> None:
        async with self._answer("DELETE", path, self._timeout):
            pass

    async def post(self, *path: str, **body: Any) -> Any:
        async with self._answer("POST", path, self._timeout, json=body) as answer:
            return await answer.json()

    async def patch(self, *path: str, **body: Any) -> Any:
        async with self._answer("PATCH", path, self._timeout, json=body) as answer:
            return await answer.json()

    async def follow(self, *path: str, **query: int) -> AsyncIterator[Any]:
        """The data of server-sent events, until the lighthouse ends the stream."""
        async with self._answer("GET", path, None, params=query) as answer:
            async for line in answer.content:
                if line.startswith(b"data:"):
                    yield json.loads(line[5:])

    @asynccontextmanager
    async def _answer(
        self, method: str, path: tuple[str, ...], timeout: float | None, **how: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        from keepstep_mesh.errors import AuthError
        from keepstep_mesh.http import Identity, Problem, leader_of, raise_for_problem
        from keepstep_mesh.tls import TlsError, explained

        tried = []
        left = list(self._addresses)
        asked = set()
        try:
            identity = Identity(self._token, self._tls)
        except TlsError as error:
            raise click.UsageError(str(error)) from error
        async with identity.session(timeout=timeout) as session:
            while left:
                address = left.pop(0)
                asked.add(address)
                url = "/".join((address, "v1", *(quote(part, safe="") for part in path)))
                try:
                    answer = await session.request(method, url, allow_redirects=False, **how)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    tried.append(f"{address}: {explained(error, address)}")
                    continue
                async with answer:
                    try:
                        if (leader := leader_of(answer)) is not None:
                            tried.append(f"{address}: does not lead; {leader} does")
                            left = [] if leader in asked else [leader]
                            continue
                        await raise_for_problem(answer)
                        yield answer
                    except AuthError as error:
                        raise Refused(
                            f"{error}\nGive a token that may do this with --token-file or KEEPSTEP_TOKEN."
                        ) from error
                    except Problem as problem:
                        raise Refused(f"{address} says no ({problem.status}): {problem}") from problem
                    except (aiohttp.ClientError, TimeoutError, OSError) as error:
                        raise Unreachable(f"{address} broke off: {str(error) or type(error).__name__}") from error
                return
        raise Unreachable(f"no {self.what} answers; tried\n  " + "\n  ".join(tried) + f"\n{self.advice}")


class Relay(Lighthouse):
    """A checkpoint relay."""

    what = "relay"
    default = None
    advice = "Start one with `keepstep up` or `keepstep relay`, or say where it is with --relay or KEEPSTEP_RELAY."
