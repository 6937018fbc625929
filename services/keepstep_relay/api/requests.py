"""What stands in a request to a relay: names, numbers and bodies, none of them believed."""

from __future__ import annotations

import asyncio
import math
import re
from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.manifest import DIGEST_BYTES
from keepstep_mesh.serving.rest import bad
from keepstep_relay.core.events import Key

RAW = "application/octet-stream"
_DIGEST = re.compile(rf"[0-9a-f]{{{2 * DIGEST_BYTES}}}")
_NUMBER = re.compile(r"\d{1,9}")
_HEX = re.compile(r"(?:[0-9a-f]{2})*")


def name(text: str, what: str) -> str:
    if (problem := names.problem(text, what)) is not None:
        raise bad(problem)
    return text


def key(request: web.Request) -> Key:
    return Key(job(request), name(request.match_info["id"], "checkpoint"))


def job(request: web.Request) -> str:
    return name(request.match_info["job"], "job")


def digest(request: web.Request) -> bytes:
    text = request.match_info["digest"]
    if _DIGEST.fullmatch(text) is None:
        raise bad(f"{text[:80]!r} is no digest: {2 * DIGEST_BYTES} hexadecimal digits, in lower case")
    return bytes.fromhex(text)


def from_hex(text: str, what: str, length: int | None = None) -> bytes:
    if _HEX.fullmatch(text) is None or (length is not None and len(text) != 2 * length):
        raise bad(f"{what} must be {'' if length is None else f'{2 * length} '}hexadecimal digits, not {text[:40]!r}")
    return bytes.fromhex(text)


def rank(request: web.Request) -> int:
    """``?rank=``, 0 unless said."""
    return _rank(request.query.get("rank", "0"))


def rank_in_path(request: web.Request) -> int:
    return _rank(request.match_info["rank"])


def _rank(text: str) -> int:
    if _NUMBER.fullmatch(text) is None:
        raise bad(f"{text[:40]!r} is no rank")
    return int(text)


def wait(request: web.Request, most: float) -> float:
    """``?wait=`` in seconds, 0 unless said, never more than ``most``."""
    text = request.query.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds >= 0:
        raise bad(f"wait is a number of seconds, not {text[:40]!r}")
    return min(seconds, most)


def check_length(request: web.Request, length: int, *, exactly: bool) -> int:
    """The length of the body that is announced; ``Problem`` unless it is ``length`` bytes, or at most so many."""
    announced = request.content_length
    if announced is None:
        raise Problem(HTTPStatus.LENGTH_REQUIRED, "say the length of the body in Content-Length")
    if announced > length:
        raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{announced} bytes where at most {length} are taken")
    if exactly and announced < length:
        raise bad(f"a body of {announced} bytes, but this chunk has {length}")
    if hdrs.CONTENT_ENCODING in request.headers:
        raise bad("a body is taken as it is, without Content-Encoding")
    return announced


async def body(request: web.Request, data: memoryview, seconds: float) -> None:
    """Reads the body, which must fill ``data``. ``Problem`` 408 when it takes too long."""
    done, length = 0, data.nbytes
    try:
        async with asyncio.timeout(seconds):
            async for part in request.content.iter_any():
                if done + len(part) > length:
                    raise bad(f"a body of more than {length} bytes")
                data[done : done + len(part)] = part
                done += len(part)
    except TimeoutError:
        raise Problem(HTTPStatus.REQUEST_TIMEOUT, f"{done} of {length} bytes came in {seconds:g} s") from None
    except web.RequestPayloadError as error:
        raise bad(f"the body broke off after {done} of {length} bytes: {error}") from error
    if done < length:
        raise bad(f"the body ended after {done} of {length} bytes")
