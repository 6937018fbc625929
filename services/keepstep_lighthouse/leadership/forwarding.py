"""Forward REST requests from a standby to the leader: proxy short reads, redirect everything else."""

from __future__ import annotations

from http import HTTPStatus

import aiohttp
from aiohttp import hdrs, web

from keepstep_mesh.net.http import Identity, Problem
from keepstep_mesh.security.tls import explained

PASS_ON_SECONDS = 5.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024
PASSED_ON = "X-Keepstep-Passed-On"


async def pass_on(request: web.Request, leader: str, identity: Identity) -> web.StreamResponse:
    """Return the leader's answer to a read; redirect every other request.

    Args:
        identity: without a token: the client's token is forwarded.

    Raises:
        Problem: the leader does not answer, or does not lead either.
        web.HTTPTemporaryRedirect: the request is not a short read.
    """
    if request.method != hdrs.METH_GET or "follow" in request.query or request.path == "/":
        raise web.HTTPTemporaryRedirect(f"{leader}{request.rel_url}")
    if PASSED_ON in request.headers:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the lighthouses have not agreed on a leader yet; retry")
    headers = {PASSED_ON: "1"}
    if hdrs.AUTHORIZATION in request.headers:
        headers[hdrs.AUTHORIZATION] = request.headers[hdrs.AUTHORIZATION]
    try:
        async with identity.session(timeout=PASS_ON_SECONDS) as http:
            answer = await http.get(f"{leader}{request.rel_url}", headers=headers, allow_redirects=False)
            body = bytearray()
            async for part in answer.content.iter_any():
                body += part
                if len(body) > MAX_ANSWER_BYTES:
                    raise Problem(
                        HTTPStatus.BAD_GATEWAY,
                        f"answer too large to forward (limit {MAX_ANSWER_BYTES} bytes); ask {leader}",
                    )
            return web.Response(body=bytes(body), status=answer.status, content_type=answer.content_type)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = explained(error, leader)
        raise Problem(HTTPStatus.BAD_GATEWAY, f"the leader {leader} does not answer: {reason}") from error
