"""Do long work on the event loop in turns with other tasks, and encode its result in pieces."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import fields, is_dataclass
from itertools import islice
from typing import Any, TypeVar

from aiohttp import web

from keepstep_mesh.serving.openapi import json_text
from keepstep_metrics.history.work import Work

T = TypeVar("T")

LOOP_TURN_SECONDS = 0.01
"""Other tasks run after each such time."""
PIECE = 50
"""Entries of a list or map that are encoded at once."""


async def in_turns(work: Work[T]) -> T:
    """Do the work and return its result."""
    began = time.perf_counter()
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        if time.perf_counter() - began > LOOP_TURN_SECONDS:
            await asyncio.sleep(0)
            began = time.perf_counter()


async def long_answer(work: Work[Any]) -> web.Response:
    """Answer with the result of the work, a view."""
    return web.Response(text=await in_turns(encoding(await in_turns(work))), content_type="application/json")


def encoding(view: Any) -> Work[str]:
    """Encode a view as JSON. Its long fields are encoded in pieces."""
    texts = []
    for one in fields(view):
        value = getattr(view, one.name)
        if isinstance(value, dict) and not is_dataclass(value):
            entries = iter(value.items())
            parts = []
            while piece := dict(islice(entries, PIECE)):
                parts.append(json_text(piece)[1:-1])
                yield
            text = "{" + ",".join(parts) + "}"
        elif isinstance(value, tuple):
            parts = []
            for first in range(0, len(value), PIECE):
                parts.append(json_text(value[first : first + PIECE])[1:-1])
                yield
            text = "[" + ",".join(parts) + "]"
        else:
            text = json_text(value)
        texts.append(f"{json.dumps(one.name)}:{text}")
        yield
    return "{" + ",".join(texts) + "}"
