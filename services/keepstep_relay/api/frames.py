"""How the main process of a relay and its other processes move the bytes of a request.

Another process forwards every request to the main process, which decides and answers. Bytes of full chunks are in
memory that both see (``SharedSlots``), so only their place travels:

* Download: the request has ``Keepstep-Frames``. If the answer has it too, its value is the length of the true body, and
  the body is a row of frames: ``slot start length`` on a line, or ``- length`` and so many bytes. The other process
  sends the bytes to the client, and answers each frame with ``DONE`` or ``TOO_SLOW`` in the body of its request.
* Upload of a full chunk: the request has ``Keepstep-Slot`` instead of a body. If the answer has it too, its value is
  the slot that waits for the body. The other process receives it there, and sends the digest in the body of its
  request. The body of the answer has the true answer.

The main process holds a slot until the other process has answered or its connection is closed.
"""

from __future__ import annotations

import json
import socket
from urllib.parse import unquote

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from keepstep_mesh.serving.application import CERTIFICATE
from keepstep_relay.tiers.shared_slots import place_of

FRAMES, SLOT = "Keepstep-Frames", "Keepstep-Slot"
CLIENT, CLIENT_CERTIFICATE = "Keepstep-Client", "Keepstep-Client-Certificate"
"""Address of the client, and the name in its certificate, percent-encoded."""
FIELDS = frozenset((FRAMES, SLOT, CLIENT, CLIENT_CERTIFICATE))
"""A process passes none of these on from a client."""
WANTED, NO_SLOT = "wanted", "none"
DONE, TOO_SLOW = b"done\n", b"slow\n"


class TooSlowError(ConnectionError):
    """A reader was too slow, and its connection was closed."""


@web.middleware
async def from_other_process(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Name the client of a request that another process forwards, instead of that process."""
    if CLIENT in request.headers and _is_forwarded(request):
        request = request.clone(remote=request.headers[CLIENT])
        request[CERTIFICATE] = unquote(request.headers.get(CLIENT_CERTIFICATE, ""))
    return await handler(request)


def _is_forwarded(request: web.BaseRequest) -> bool:
    """Whether the request comes from another process of this relay: clients never have a Unix socket."""
    found = request.get_extra_info("socket")
    return found is not None and found.family == socket.AF_UNIX


def wants_frames(request: web.BaseRequest) -> bool:
    return FRAMES in request.headers and _is_forwarded(request)


def wants_slot(request: web.BaseRequest) -> bool:
    return SLOT in request.headers and _is_forwarded(request)


def response(status: int, length: int, headers: dict[str, str]) -> web.StreamResponse:
    """Return a response of frames. ``length`` and ``headers`` are those of the true answer."""
    framed = web.StreamResponse(status=status, headers={**headers, FRAMES: str(length)})
    framed.enable_chunked_encoding()
    return framed


async def send(request: web.BaseRequest, framed: web.StreamResponse, data: memoryview) -> None:
    """Return when the other process has sent ``data``. Raises ``TooSlowError``, ``ConnectionError``."""
    place = place_of(data)
    if place is None:
        await framed.write(b"- %d\n" % data.nbytes)
        await framed.write(data)
    else:
        await framed.write(b"%d %d %d\n" % (*place, data.nbytes))
    said = await _line(request)
    if said == TOO_SLOW:
        raise TooSlowError("the reader was too slow")
    if said != DONE:
        raise ConnectionResetError("another process of the relay did not send the bytes")


class Upload:
    """Another process receives a chunk into ``data``."""

    def __init__(self, request: web.BaseRequest) -> None:
        self._request = request
        self._response = web.StreamResponse()
        self._response.enable_chunked_encoding()

    async def digest(self, data: memoryview) -> bytes:
        """Return the digest of the received bytes; empty: the body did not arrive. Raises ``ConnectionError``."""
        place = place_of(data)
        self._response.headers[SLOT] = NO_SLOT if place is None else str(place.slot)
        await self._response.prepare(self._request)
        await self._response.write(b"\n")  # sends the head too
        return b"" if place is None else bytes.fromhex((await _line(self._request)).decode())

    async def answer(self, answer: web.Response | None) -> web.StreamResponse:
        """Send the true answer, if the body arrived. Return what the handler returns."""
        if answer is not None:
            headers = {hdrs.CONTENT_TYPE: answer.content_type, **answer.headers}
            body = answer.text if answer.body else ""
            await self._response.write(json.dumps([answer.status, headers, body]).encode())
        return self._response


async def _line(request: web.BaseRequest) -> bytes:
    try:
        while (line := await request.content.readline()) == b"\n":
            pass  # the first one only has sent the head
    except web.RequestPayloadError as error:
        raise ConnectionResetError(f"another process of the relay ended: {error}") from error
    return line
