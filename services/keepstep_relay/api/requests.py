"""Parse and check names, numbers and bodies of requests to a relay."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.manifest import DIGEST_BYTES, MAX_MANIFEST_BYTES, chunk_digest
from keepstep_mesh.serving.rest import bad
from keepstep_relay.api.direct_bodies import body_of
from keepstep_relay.core.events import Key
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.node import RelayNode

RAW = "application/octet-stream"
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_NUMBER = re.compile(r"\d{1,9}")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


def name(text: str, what: str) -> str:
    if (problem := names.problem(text, what)) is not None:
        raise bad(problem)
    return text


def key(request: web.Request, core: RelayCore) -> Key:
    """Return the version of a checkpoint that ``{id}`` names: ``NAME`` the current one, ``NAME~N`` version N."""
    text, tilde, version = request.match_info["id"].partition("~")
    found = Key(job(request), name(text, "checkpoint"))
    if not tilde:
        return core.current(found)
    if _NUMBER.fullmatch(version) is None:
        raise bad(f"invalid version {version[:40]!r} of checkpoint {text}: expected an integer from 0")
    return found.at(int(version))


def job(request: web.Request) -> str:
    return name(request.match_info["job"], "job")


def digest(request: web.Request) -> bytes:
    text = request.match_info["digest"]
    if _DIGEST.fullmatch(text) is None:
        raise bad(f"invalid digest {text[:80]!r}: expected {2 * DIGEST_BYTES} lower-case hexadecimal digits")
    return bytes.fromhex(text)


def from_hex(text: str, what: str, length: int | None = None) -> bytes:
    if _HEX.fullmatch(text) is None or (length is not None and len(text) != 2 * length):
        raise bad(
            f"invalid {what} {text[:40]!r}: expected {'' if length is None else f'{2 * length} '}hexadecimal digits"
        )
    return bytes.fromhex(text)


def rank(request: web.Request) -> int:
    """Return ``?rank=``; default: 0."""
    return _rank(request.query.get("rank", "0"))


def rank_in_path(request: web.Request) -> int:
    return _rank(request.match_info["rank"])


def _rank(text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise bad(f"invalid rank {text[:40]!r}: expected an integer from 0")
    return int(text)


def wait(request: web.Request, most: float) -> float:
    """Return ``?wait=`` in seconds, at most ``most``; default: 0."""
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise bad(f"invalid wait {text[:40]!r}: expected a number of seconds")
    return min(seconds, most)


def check_length(request: web.Request, length: int, *, exactly: bool) -> int:
    """Return Content-Length. ``Problem`` unless it is ``length``, or at most ``length`` if not ``exactly``."""
    direct = body_of(request)
    announced = request.content_length if direct is None else direct.length
    if announced is None:
        raise Problem(HTTPStatus.LENGTH_REQUIRED, "missing Content-Length")
    if announced > length:
        raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"body too large: {announced} bytes (limit {length})")
    if exactly and announced < length:
        raise bad(f"body too short: {announced} bytes, this chunk has {length}")
    if hdrs.CONTENT_ENCODING in request.headers:
        raise bad("unsupported Content-Encoding: send the body as it is")
    return announced


async def chunk(request: web.BaseRequest, data: memoryview, seconds: float) -> bytes:
    """Read the body, a whole chunk, into ``data``, and return its digest. ``Problem``: see ``body``."""
    direct = body_of(request)
    if direct is not None:
        return await direct.receive(data, seconds)
    await body(request, data, seconds)
    return chunk_digest(data)


async def body(request: web.BaseRequest, data: memoryview, seconds: float) -> None:
    """Read the body, which must fill ``data``. ``Problem`` 408 if it takes longer than ``seconds``."""
    done, length = 0, data.nbytes
    try:
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                if done + len(part) > length:
                    raise bad(f"body too large: more than {length} bytes")
                data[done : done + len(part)] = part
                done += len(part)
    except TimeoutError:
        raise Problem(HTTPStatus.REQUEST_TIMEOUT, f"body too slow: {done} of {length} bytes in {seconds:g} s") from None
    except web.RequestPayloadError as error:
        raise bad(f"incomplete body: {done} of {length} bytes: {error}") from error
    if done < length:
        raise bad(f"incomplete body: {done} of {length} bytes")


@asynccontextmanager
async def manifest_body(request: web.Request, relay: RelayNode) -> AsyncIterator[bytes]:
    """Give the body of an upload, at most as long as a manifest. It holds one of the relay's places for such bodies."""
    length = check_length(request, MAX_MANIFEST_BYTES, exactly=False)
    relay.take_manifest_slot()
    try:
        data = bytearray(length)
        await body(request, memoryview(data), relay.settings.body_timeout)
        yield bytes(data)
    finally:
        relay.give_manifest_slot()
