"""Shared code of REST handlers: check bodies against dataclasses, and answer with dataclasses."""

from __future__ import annotations

import typing
from http import HTTPStatus
from types import NoneType
from typing import Any, TypeVar

from aiohttp import web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.messages import Detail
from keepstep_mesh.serving import openapi
from keepstep_mesh.serving.application import read_json
from keepstep_mesh.text import listed

T = TypeVar("T")

MAX_NAMED = 20
"""Limit of known names in an error."""
MAX_DIGITS = 20
"""Limit of a number in a request."""


def known_names(kind: str, names: list[str]) -> str:
    """Return the part of an error that lists the valid names: ``known jobs: a, b``."""
    return f"known {kind}: {listed(names, MAX_NAMED) or 'none'}"


def bad(detail: str) -> Problem:
    return Problem(HTTPStatus.BAD_REQUEST, detail)


def number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise bad(f"invalid {name} {text[:40]!r}: expected a whole number of at most {MAX_DIGITS} digits")
    return int(text)


TAKEN: dict[Any, tuple[tuple[type, ...], str]] = {
    str: ((str,), "text"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    float | None: ((int, float, NoneType), "a number or null"),
    dict[str, Detail]: ((dict,), "an object"),
    bool: ((bool,), "true or false"),
    str | None: ((str, NoneType), "text or null"),
}
"""JSON types that are accepted for a field of this type, and their name in errors."""


async def read_body(request: web.Request, cls: type[T]) -> T:
    """Return the body as ``cls``. Raises ``Problem`` 400, which names a field that is unknown or of the wrong type."""
    plain = checked(await read_json(request), cls)
    try:
        return cls(**plain)
    except TypeError:
        raise bad(f"a field is missing; {known_names('fields', sorted(typing.get_type_hints(cls)))}") from None


def checked(plain: dict[str, Any], cls: type) -> dict[str, Any]:
    """Return ``plain``. Raises ``Problem`` 400 unless ``cls`` has all of its fields, each of its type."""
    hints = typing.get_type_hints(cls)
    if unknown := sorted(set(plain) - set(hints)):
        raise bad(f"unknown field {unknown[0]!r}; {known_names('fields', sorted(hints))}")
    for name, value in plain.items():
        types, called = TAKEN[hints[name]]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise bad(f"{name} must be {called}, not {value!r:.40}")
    return plain


def json_answer(view: object, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(text=openapi.json_text(view), status=status, content_type="application/json")
