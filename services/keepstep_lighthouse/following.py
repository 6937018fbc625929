"""What a lighthouse that does not lead does with a request: reads are answered with the leader's answer, whatever
changes something, or lasts, is sent to the leader.
"""

from __future__ import annotations

from http import HTTPStatus

import aiohttp
from aiohttp import hdrs, web

from keepstep_mesh.http import Identity, Problem
from keepstep_mesh.tls import explained

PASS_ON_SECONDS = 5.0
MAX_ANSWER_BYTES = 64 * 1024 * 1024


async def pass_on(request: web.Request, leader: str, identity: Identity) -> web.StreamResponse:
    """The leader's answer to a read, a redirection of everything else. Raises ``Problem`` when the leader is silent.

    ``identity``: without a token of its own; that of who asks is passed on.
    """
    if request.method != hdrs.METH_GET or "follow" in request.query:
        raise web.HTTPTemporaryRedirect(f"{leader}{request.rel_url}")
    headers = {name: request.headers[name] for name in (hdrs.AUTHORIZATION,) if name in request.headers}
    try:
        async with identity.session(timeout=PASS_ON_SECONDS) as http:
            answer = await http.get(f"{leader}{request.rel_url}", headers=headers, allow_redirects=False)
            body = await answer.content.read(MAX_ANSWER_BYTES)
            return web.Response(body=body, status=answer.status, content_type=answer.content_type)
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        reason = explained(error, leader)
        raise Problem(HTTPStatus.BAD_GATEWAY, f"{leader} leads and does not answer: {reason}") from error
