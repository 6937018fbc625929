"""The OpenAPI 3.1 description of a service, made from its routes and from the dataclasses that they answer with."""

from __future__ import annotations

import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import version
from typing import Any

from keepstep_mesh.net.http import PROBLEM_JSON
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route

RAW: dict[str, Any] = {}
"""The schema of bytes as they are."""
SIMPLE = {bool: "boolean", int: "integer", float: "number", str: "string", types.NoneType: "null"}


@dataclass(frozen=True, slots=True)
class Shape:
    """Input and output of a route: dataclasses, and query parameters with their meaning."""

    answer: type | None
    """None: nothing."""
    status: int = 200
    body: type | None = None
    query: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)
    """Query parameters that are ``true`` or ``false``."""
    takes_bytes: bool = False
    """The body is raw bytes."""
    gives_bytes: bool = False
    """The answer is raw bytes."""
    gives_page: bool = False
    """The answer is an HTML page."""


COMMON = {
    "/healthz": "the process lives",
    "/readyz": "the service can do its work",
    "/metrics": "Prometheus text format",
}
"""Routes that every service has."""


def plain(value: object) -> Any:
    """Convert a view to JSON types: dataclasses to objects, enums to their values, NaN and infinities to null."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else repr(value)


def json_text(view: object) -> str:
    """Encode a view as the JSON of ``plain``. Much faster, unless it has NaN or infinities."""
    try:
        return json.dumps(view, default=_entries, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(plain(view), separators=(",", ":"))


def _entries(value: object) -> Any:
    """Convert a value that the encoder does not know to one that it does. It calls this again for the parts."""
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        kind: Any = type(value)
        return {name: getattr(value, name) for name in _names(kind)}
    return dict(value) if isinstance(value, Mapping) else repr(value)


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(one.name for one in fields(cls))


def describe(title: str, routes: Iterable[Route], shapes: Mapping[str, Shape]) -> dict[str, Any]:
    """Return the OpenAPI document of a service. The keys of ``shapes`` are method and path: ``GET /v1/jobs``."""
    schemas: dict[str, Any] = {
        "Problem": {
            "type": "object",
            "properties": {
                "type": {"type": "string"},
                "title": {"type": "string"},
                "status": {"type": "integer"},
                "detail": {"type": "string"},
            },
            "required": ["type", "title", "status", "detail"],
            "additionalProperties": True,
        }
    }
    paths: dict[str, Any] = {path: {"get": _common(path, summary)} for path, summary in COMMON.items()}
    for route in routes:
        operation = _operation(route, shapes.get(f"{route.method} {route.path}"), schemas)
        paths.setdefault(route.path, {})[route.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version("keepstep")},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _common(path: str, summary: str) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": summary, "responses": {"200": {"description": summary}, **_problem()}}
    if path == "/metrics":
        operation["security"] = [{"token": []}]
    return operation


def _operation(route: Route, shape: Shape | None, schemas: dict[str, Any]) -> dict[str, Any]:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    operation: dict[str, Any] = {"summary": route.summary}
    if shape is None:
        status = "101" if route.path.endswith("/session") else "200"
        operation["responses"] = {status: {"description": route.summary}, **_problem()}
    else:
        parameters += [
            {"name": name, "in": "query", "description": meaning, "schema": {"type": kind}}
            for kind, given in (("number", shape.query), ("boolean", shape.switches))
            for name, meaning in given.items()
        ]
        answer: dict[str, Any] = {"description": route.summary}
        if shape.answer is not None:
            answer["content"] = {"application/json": {"schema": _schema(shape.answer, schemas)}}
        if shape.gives_bytes:
            answer["content"] = {"application/octet-stream": {"schema": RAW}}
        if shape.gives_page:
            answer["content"] = {"text/html": {"schema": {"type": "string"}}}
        if "follow" in shape.query:
            answer["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        operation["responses"] = {str(shape.status): answer, **_problem()}
        if shape.takes_bytes:
            operation["requestBody"] = {"required": True, "content": {"application/octet-stream": {"schema": RAW}}}
        if shape.body is not None:
            needed = route.method == "PATCH" or any(one.default is MISSING for one in fields(shape.body))
            schema = _schema(shape.body, schemas)
            operation["requestBody"] = {"required": needed, "content": {"application/json": {"schema": schema}}}
    if parameters:
        operation["parameters"] = parameters
    if route.access is not Access.OPEN:
        operation["security"] = [{"token": []}]
        operation["x-roles"] = sorted(role.value for role in route.access.value or ())
    return operation


def _problem() -> dict[str, Any]:
    content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {"default": {"description": "what went wrong (RFC 9457)", "content": content}}


def _schema(hint: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    if hint in SIMPLE:
        return {"type": SIMPLE[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"type": "string", "enum": [one.value for one in hint]}
    if is_dataclass(hint) and isinstance(hint, type):
        if hint.__name__ not in schemas:
            schemas[hint.__name__] = {}
            hints = typing.get_type_hints(hint)
            schemas[hint.__name__] = {
                "type": "object",
                "properties": {
                    one.name: _schema(hints[one.name], schemas) | one.metadata.get("schema", {}) for one in fields(hint)
                },
                "required": [
                    one.name for one in fields(hint) if one.default is MISSING and one.default_factory is MISSING
                ],
            }
        return {"$ref": f"#/components/schemas/{hint.__name__}"}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_schema(one, schemas) for one in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _schema(arguments[0], schemas)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1], schemas)}
    return {}
