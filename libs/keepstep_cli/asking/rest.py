"""Client of the lighthouse's REST API for commands: it fails over, and turns every failure into advice."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import click

from keepstep_cli.asking.defaults import DEFAULT_LIGHTHOUSE
from keepstep_cli.errors import Refused, Unreachable

if TYPE_CHECKING:
    from types import ModuleType

    import aiohttp

    from keepstep_mesh.errors import AuthError
    from keepstep_mesh.security.tls import TlsFiles
    from keepstep_mesh.security.tokens import ClientToken

Answer = TypeVar("Answer")

TIMEOUT_SECONDS = 10.0
READ_SECONDS = 600.0
"""Timeout for a manifest or a chunk, on a slow link."""
MAX_ANSWER_BYTES = 64 << 20
MAX_LINE_BYTES = 16 << 20
"""Of an event that is followed."""
SILENCE_SECONDS = 45.0
"""Maximum silence of a followed lighthouse, which sends a ping at least every 15 s."""
FOLLOW_PATIENCE_SECONDS = 30.0
"""Time for which a follower looks for another lighthouse after the last one failed."""
ASK_AGAIN_SECONDS = 0.5
NO_LIGHTHOUSE = (
    "not a keepstep lighthouse (torchft's has another protocol: trainers of keepstep need `keepstep up` or "
    "`keepstep lighthouse` instead)"
)


def run(asking: Coroutine[Any, Any, Answer]) -> Answer:
    import asyncio

    return asyncio.run(asking)


def read_token(token_file: Path | None) -> ClientToken:
    """Return the token of the flag's file, or else of the environment; None without one."""
    from keepstep_mesh.errors import AuthError
    from keepstep_mesh.security.tokens import ClientToken

    environment = os.environ if token_file is None else {"KEEPSTEP_TOKEN_FILE": str(token_file)}
    try:
        return ClientToken(environment)
    except AuthError as error:
        told = str(error)
        if token_file is not None:
            told = told.replace("KEEPSTEP_TOKEN_FILE=", "--token-file ")
        raise click.UsageError(told) from error


def _escaped(name: str) -> str:
    """Quote ``name`` as one part of a path, also ``.`` and ``..``."""
    return quote(name, safe="", errors="surrogateescape") if name.strip(".") else name.replace(".", "%2E")


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Of a body that may go on for ever."""
    rest = bytearray()
    async for part in answer.content.iter_any():
        rest += part
        if b"\n" in part:
            *whole, last = rest.split(b"\n")
            rest = last
            for line in whole:
                yield bytes(line)
        if len(rest) > MAX_LINE_BYTES:
            raise Refused(f"line of {answer.url} too long (limit {MAX_LINE_BYTES} bytes)", answer.status)


def _shown(value: Any) -> Any:
    """Return a value of JSON whose texts can be shown on a terminal: a group may have sent them."""
    from keepstep_mesh.text import printable

    if isinstance(value, str):
        return printable(value)
    if isinstance(value, list):
        return [_shown(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): _shown(one) for name, one in value.items()}
    return value


class Lighthouse:
    """Client of the first of ``addresses`` that answers within ``timeout`` seconds. Paths are below /v1.

    ``told``: a lighthouse named the addresses, so send them a derived token, and not the token itself.
    """

    what = "lighthouse"
    default: str | None = DEFAULT_LIGHTHOUSE
    starts = "`keepstep up`"
    flags = "--lighthouse or KEEPSTEP_LIGHTHOUSE"
    impostor = NO_LIGHTHOUSE
    has_leader = True
    """Whether it may redirect to another lighthouse."""
    forms: tuple[str, ...] = ("application/json", "text/event-stream")
    """Content types of its answers."""

    def __init__(
        self,
        addresses: str | None,
        token: ClientToken | None,
        tls: TlsFiles | None = None,
        timeout: float = TIMEOUT_SECONDS,
        *,
        told: bool = False,
    ) -> None:
        from keepstep_mesh.config.settings import split_addresses

        try:
            self._addresses = split_addresses(addresses or self.default or "")
        except ValueError as error:
            raise click.UsageError(f"--{self.what}: {error}") from error
        self._token = token
        self._tls = tls
        self._timeout = timeout
        self._told = told

    def relay(self, address: str, timeout: float) -> Relay:
        """Return a client of a relay that it named, with the same certificate and a derived token."""
        return Relay(address, self._token, self._tls, timeout, told=True)

    async def get(self, *path: str, **query: int | str) -> Any:
        async with self._answer("GET", path, self._timeout, params=query) as answer:
            return await self._object(answer)

    async def read(self, *path: str, limit: int, **query: int | str) -> bytes:
        """Return the answer as bytes. Raises ``Refused`` if it is longer than ``limit``."""
        from keepstep_mesh.net.http import read_answer

        async with self._answer("GET", path, READ_SECONDS, params=query) as answer:
            return await read_answer(answer, limit)

    async def delete(self, *path: str, **query: str) -> Any:
        """Return the answer; None if it is empty."""
        async with self._answer("DELETE", path, self._timeout, params=query) as answer:
            return None if answer.status == HTTPStatus.NO_CONTENT else await self._object(answer)

    async def post(self, *path: str, **body: Any) -> Any:
        """Return the answer; None if it is empty."""
        async with self._answer("POST", path, self._timeout, json=body) as answer:
            return None if answer.status == HTTPStatus.NO_CONTENT else await self._object(answer)

    async def patch(self, *path: str, **body: Any) -> Any:
        async with self._answer("PATCH", path, self._timeout, json=body) as answer:
            return await self._object(answer)

    async def _object(self, answer: aiohttp.ClientResponse) -> dict[str, Any]:
        from keepstep_mesh.net.http import Problem, read_json_answer

        try:
            return _shown(await read_json_answer(answer, MAX_ANSWER_BYTES))  # type: ignore[no-any-return]
        except Problem as problem:
            raise Unreachable(f"{answer.url.origin()}: {self.impostor} ({problem})") from problem

    async def follow(
        self, *path: str, after: int, told: Callable[[str], None], **query: int
    ) -> AsyncGenerator[Any, None]:
        """Yield the data of server-sent events; after a failure, continue with the next lighthouse that answers.

        ``told`` receives a message then. Raises ``Unreachable`` if none answers for ``FOLLOW_PATIENCE_SECONDS``.
        """
        import asyncio

        begun, gone_since, said = False, 0.0, ""
        while True:
            try:
                async with contextlib.aclosing(self._follow_one(path, {**query, "after": after})) as events:
                    async for event in events:
                        begun, gone_since, said = True, 0.0, ""
                        if event is not None:
                            after = max(after, event["id"])
                            yield event
                why = f"the lighthouse ended the events; asking for those after {after}"
            except Unreachable as error:
                if not begun or (gone_since and time.monotonic() - gone_since > FOLLOW_PATIENCE_SECONDS):
                    raise
                why = f"{error.message.splitlines()[0]}; asking for the events after {after}"
            except Refused as error:
                if error.status != HTTPStatus.NOT_FOUND and not error.may_pass:
                    raise
                begun, gone_since, why = True, 0.0, f"{error.message}; waiting for it"
            gone_since = gone_since or time.monotonic()
            if not said:
                said = why
                told(why)
            await asyncio.sleep(ASK_AGAIN_SECONDS)

    async def _follow_one(self, path: tuple[str, ...], query: dict[str, int]) -> AsyncGenerator[Any, None]:
        """Yield None when the stream is open, then the events."""
        async with self._answer("GET", path, None, params=query) as answer:
            if answer.content_type != "text/event-stream":
                raise Unreachable(f"{answer.url.origin()}: {self.impostor}")
            yield None
            async for line in _lines(answer):
                if line.startswith(b"data:"):
                    try:
                        yield _shown(json.loads(line[5:]))
                    except ValueError as error:
                        raise Unreachable(f"{answer.url.origin()}: {self.impostor}") from error

    @asynccontextmanager
    async def _answer(
        self, method: str, path: tuple[str, ...], timeout: float | None, **how: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """``timeout``: for the whole request; None: no limit, except ``SILENCE_SECONDS`` without a byte."""
        import aiohttp
        from yarl import URL

        from keepstep_mesh.errors import AuthError
        from keepstep_mesh.net.http import Identity, Problem, leader_of, raise_for_problem
        from keepstep_mesh.security.request_errors import explained, is_away
        from keepstep_mesh.security.tls import TlsError

        tried: list[str] = []
        right: list[str] = []
        away = True
        left = list(self._addresses)
        asked = set()
        try:
            identity = Identity(self._token, self._tls)
        except TlsError as error:
            raise click.UsageError(str(error)) from error
        if timeout is None or timeout > SILENCE_SECONDS:
            how["timeout"] = aiohttp.ClientTimeout(timeout, sock_connect=TIMEOUT_SECONDS, sock_read=SILENCE_SECONDS)
        async with identity.session(timeout=timeout, kind=self.what) as session:
            while left:
                address = left.pop(0)
                asked.add(address)
                if self._told:
                    how["headers"] = identity.headers_for(self.what, address)
                url = URL("/".join((address, "v1", *map(_escaped, path))), encoded=True)
                try:
                    answer = await session.request(method, url, allow_redirects=False, **how)
                except (aiohttp.ClientError, TimeoutError, OSError) as error:
                    tried.append(f"{address}: {explained(error, address)}")
                    away = away and is_away(error)
                    continue
                async with answer:
                    if self.has_leader and (leader := leader_of(answer)) is not None:
                        tried.append(f"{address}: does not lead; {leader} does")
                        left = [] if leader in asked else [leader]
                        continue
                    if not self._is_ours(answer):
                        tried.append(f"{address}: {self.impostor}")
                        away = False
                        continue
                    try:
                        await raise_for_problem(answer)
                        yield answer
                    except AuthError as error:
                        raise Refused(self._advised(error), HTTPStatus.UNAUTHORIZED) from error
                    except Problem as problem:
                        if "service" not in problem.fields:
                            raise Refused(
                                f"{address} refused the request ({problem.status}): {problem}", problem.status
                            ) from problem
                        tried.append(f"{address}: {problem}")
                        right += problem.fields["addresses"]
                        away = False
                        continue
                    except (aiohttp.ClientError, TimeoutError, OSError) as error:
                        raise Unreachable(f"{address} broke off: {explained(error, address)}") from error
                return
        advice = f"Say where it is with {self.flags}."
        if right:
            advice = f"Use {self.flags.split()[0]} {','.join(dict.fromkeys(right))}."
        elif away:
            advice = f"Start one with {self.starts}, or say where it is with {self.flags}."
        said = "\n  ".join((f"no {self.what} answers; tried", *tried))
        raise Unreachable(f"{said}\n{advice}", may_pass=away)

    def _advised(self, error: AuthError) -> str:
        source = "" if self._token is None else self._token.source
        shown = f"The token came from {source}. " if source else ""
        return f"{error}\n{shown}Give a token that may do this with --token-file or KEEPSTEP_TOKEN."

    def _is_ours(self, answer: aiohttp.ClientResponse) -> bool:
        """Whether the answer has the expected form."""
        if HTTPStatus.MULTIPLE_CHOICES <= answer.status < HTTPStatus.BAD_REQUEST:
            return False
        if answer.status >= HTTPStatus.BAD_REQUEST:
            return answer.content_type == "application/problem+json"
        return not answer.content_length or answer.content_type in self.forms


class Relay(Lighthouse):
    """A checkpoint relay."""

    what = "relay"
    default = None
    starts = "`keepstep up` or `keepstep relay`"
    flags = "--relay or KEEPSTEP_RELAY"
    impostor = "not a keepstep relay"
    has_leader = False
    forms = ("application/json", "application/octet-stream")

    @property
    def address(self) -> str:
        """Its first address."""
        return self._addresses[0]

    async def checkpoints(self, job: str) -> Any:
        """Return the checkpoints of a job."""
        return await self.get(*_paths().checkpoints(job))

    async def checkpoint(self, job: str, name: str) -> Any:
        """Return one checkpoint, rank by rank."""
        return await self.get(*_paths().checkpoint(job, name))

    async def manifest(self, job: str, name: str, rank: int, *, limit: int) -> bytes:
        """Return the manifest of a rank. Raises ``Refused`` if it is longer than ``limit``."""
        return await self.read(*_paths().checkpoint(job, name, "manifest"), limit=limit, rank=rank)

    async def chunk(self, digest: bytes, *, limit: int) -> bytes:
        """Return a chunk. Raises ``Refused`` if it is longer than ``limit``."""
        return await self.read(*_paths().chunk(digest), limit=limit)

    async def remove(self, job: str, name: str) -> None:
        """Delete a checkpoint."""
        await self.delete(*_paths().checkpoint(job, name))

    def each(self) -> list[Relay]:
        """Return a client of each of its addresses alone."""
        return [Relay(one, self._token, self._tls, self._timeout, told=self._told) for one in self._addresses]


def _paths() -> ModuleType:
    """Return the URLs of relays, loaded when a command asks one."""
    from keepstep.relay_client import relay_paths

    return relay_paths
