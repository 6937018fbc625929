"""What a lighthouse that does not lead does with a request: reads are answered with the leader's answer, whatever
changes something, or lasts, is sent to the leader.
"""

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
    """The leader's answer to a read, a redirection of everything else. Raises ``Problem`` when the leader is silent.

    ``identity``: without a token of its own; that of who asks is passed on.
    """
    if request.method != hdrs.METH_GET or "follow" in request.query or request.path == "/":
        raise web.HTTPTemporaryRedirect(f"{leader}{request.rel_url}")
    if PASSED_ON in request.headers:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the lighthouses do not agree yet who leads; ask again")
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
                    raise Problem(HTTPStatus.BAD_GATEWAY, f"the answer is too long to be passed on; ask {leader}")
            return web.Response(body=bytes(body), status=answer.status, content_type=answer.content_type)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = explained(error, leader)
        raise Problem(HTTPStatus.BAD_GATEWAY, f"{leader} leads and does not answer: {reason}") from error
