"""Handlers with which relays and metrics services register."""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus
from typing import TypeVar

from aiohttp import web

from keepstep_lighthouse.api.bodies import ServiceBody
from keepstep_lighthouse.jobs.lighthouse_node import LighthouseNode
from keepstep_lighthouse.leadership.term import TermOverError
from keepstep_lighthouse.registry import service_records
from keepstep_lighthouse.registry.service_registry import new_record
from keepstep_lighthouse.store.contract import StoreError
from keepstep_mesh.net.http import Problem
from keepstep_mesh.serving.rest import bad, json_answer, read_body

T = TypeVar("T")


class ServiceHandlers:
    def __init__(self, node: LighthouseNode) -> None:
        self._node = node

    async def put_service(self, request: web.Request) -> web.Response:
        body, term = await read_body(request, ServiceBody), self._node.leading()
        kind, name = request.match_info["kind"], request.match_info["name"]
        record = new_record(kind, name, body.address, body.ttl_seconds, body.details)
        if (problem := service_records.record_problem(record)) is not None:
            raise bad(problem)
        return json_answer(await _written(self._node.registry.put(term.epoch, record)))

    async def delete_service(self, request: web.Request) -> web.Response:
        kind, name = request.match_info["kind"], request.match_info["name"]
        if (problem := service_records.name_problem(kind, name)) is not None:
            raise bad(problem)
        await _written(self._node.registry.delete(self._node.leading().epoch, kind, name))
        return web.Response(status=HTTPStatus.NO_CONTENT)


async def _written(writing: Awaitable[T]) -> T:
    try:
        return await writing
    except (StoreError, TermOverError) as error:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error)) from error
    except TimeoutError:
        raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, "the store does not answer; retry") from None
