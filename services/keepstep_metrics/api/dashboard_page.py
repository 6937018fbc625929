"""The dashboard: static files without access control. Their data come from the JSON API, which needs a token."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

from aiohttp import hdrs, web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import ROLE, Route
from keepstep_mesh.serving.openapi import Shape
from keepstep_mesh.serving.rest import json_answer

STATIC = Path(__file__).parents[1] / "dashboard"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {
    str(path.relative_to(STATIC)): TYPES.get(path.suffix, "text/plain") for path in STATIC.rglob("*") if path.is_file()
}
"""Every file that is served: name below ``/static/`` -> content type."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    hdrs.CACHE_CONTROL: "no-cache",  # the browser revalidates each time
}


@dataclass(frozen=True, slots=True)
class WhoAmI:
    """The role of the client's token."""

    role: str
    """``worker``, ``service`` or ``admin``. The dashboard offers orders to an admin only."""
    token: bool
    """Whether the client sent a token. Without one, only a service without tokens answers."""


SHAPES = {
    "GET /": Shape(None, gives_bytes=True),
    "GET /static/{file}": Shape(None, gives_bytes=True),
    "GET /static/vendor/{file}": Shape(None, gives_bytes=True),
    "GET /v1/whoami": Shape(WhoAmI),
}


def routes() -> list[Route]:
    return [
        Route("GET", "/", page, Access.OPEN, "the dashboard"),
        Route("GET", "/static/{file}", static, Access.OPEN, "files of the dashboard"),
        Route("GET", "/static/vendor/{file}", static, Access.OPEN, "libraries of the dashboard"),
        Route("GET", "/v1/whoami", whoami, Access.READ, "the role of the client's token"),
    ]


async def page(_request: web.Request) -> web.StreamResponse:
    return _file("index.html")


async def static(request: web.Request) -> web.StreamResponse:
    return _file(request.path.removeprefix("/static/"))


async def whoami(request: web.Request) -> web.Response:
    return json_answer(WhoAmI(request[ROLE].value, hdrs.AUTHORIZATION in request.headers))


def _file(name: str) -> web.FileResponse:
    if name not in FILES:
        raise Problem(HTTPStatus.NOT_FOUND, f"the dashboard has no file {name!r}")
    return web.FileResponse(STATIC / name, headers={**HEADERS, hdrs.CONTENT_TYPE: f"{FILES[name]}; charset=utf-8"})
