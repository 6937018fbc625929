"""Map the errors of a relay to problems with a status."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import web

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.http import Problem
from keepstep_mesh.serving.application import Handler
from keepstep_relay.core.events import Cause, RefusedError
from keepstep_relay.node import RETRY_AFTER_SECONDS
from keepstep_relay.tiers.chunks import GoneError
from keepstep_relay.tiers.disk_tier import DamagedError, DiskError
from keepstep_relay.tiers.durable_tier import DurableError
from keepstep_relay.tiers.memory_tier import MemoryFullError

STATUS = {
    Cause.UNKNOWN: HTTPStatus.NOT_FOUND,
    Cause.CONFLICT: HTTPStatus.CONFLICT,
    Cause.GONE: HTTPStatus.GONE,
    Cause.FULL: HTTPStatus.INSUFFICIENT_STORAGE,
}

log = get_logger("keepstep.relay")


def explained(handler: Handler) -> Handler:
    """Map the errors of a handler to problems with a status."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except Exception as error:
            problem = problem_of(error, request.path)
            if problem is None:
                raise
            raise problem from error

    return handle


def problem_of(error: Exception, path: str) -> Problem | None:
    """Return the answer to a request for ``path`` that failed; None: the error is a fault of the relay."""
    match error:
        case RefusedError():
            return Problem(STATUS[error.cause], str(error))
        case GoneError():
            return Problem(HTTPStatus.GONE, str(error))
        case DamagedError():
            return Problem(HTTPStatus.CONFLICT, str(error))
        case DiskError():
            if not error.full:  # the tier reports a full disk
                log.error("request failed: disk tier", path=path, reason=str(error))
            status = HTTPStatus.INSUFFICIENT_STORAGE if error.full else HTTPStatus.SERVICE_UNAVAILABLE
            return Problem(status, str(error), retry_after=None if error.full else RETRY_AFTER_SECONDS)
        case MemoryFullError() | DurableError():
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, str(error), retry_after=RETRY_AFTER_SECONDS)
        case TimeoutError():
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, "timed out; retry", retry_after=RETRY_AFTER_SECONDS)
        case Problem():
            return error
    return None
