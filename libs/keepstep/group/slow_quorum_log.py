"""Logs why a quorum is waited for once it takes long; who waits would else hear of it only when the time is over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from urllib.parse import quote

import aiohttp

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import raise_for_problem, read_json_answer
from keepstep_mesh.session.lighthouse_session import LighthouseSession

log = get_logger("keepstep.group")

PATIENCE_SECONDS = 5.0
REASON_LOG_SECONDS = 60.0
"""Between two such lines, however often there is a reason for one."""
ANSWER_SECONDS = 5.0


class SlowQuorumLog:
    """``run``: owns the question to the lighthouse, as a task."""

    def __init__(
        self, session: LighthouseSession, replica_id: str, run: Callable[[Coroutine[object, object, None]], None]
    ) -> None:
        self._session = session
        self._replica_id = replica_id
        self._run = run
        self._reasons_logged = LogLimiter(REASON_LOG_SECONDS)
        self._waits = 0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While inside, a quorum is waited for."""
        self._waits += 1
        timer = asyncio.get_running_loop().call_later(PATIENCE_SECONDS, self._lose_patience, self._waits)
        try:
            yield
        finally:
            self._waits += 1
            timer.cancel()

    def _lose_patience(self, wait: int) -> None:
        if self._reasons_logged.allows(asyncio.get_running_loop().time()):
            self._run(self._say_why(wait))

    async def _say_why(self, wait: int) -> None:
        try:
            why = await _why(self._session, self._replica_id)
        except (aiohttp.ClientError, OSError, KeepstepError, ValueError, LookupError) as error:
            why = f"the lighthouse does not say why: {str(error) or type(error).__name__}"
        if self._waits == wait:
            log.warning("waiting for a quorum", replica_id=self._replica_id, reason=why)


async def _why(session: LighthouseSession, replica_id: str) -> str:
    """What the lighthouse says of the group, else of the job. Raises like any request over HTTP."""
    if session.lighthouse:
        job = session.lighthouse + session.job_path
        async with session.identity.session(timeout=ANSWER_SECONDS) as http:
            for place in (f"{job}/replicas/{quote(replica_id, safe='')}", f"{job}/quorum"):
                async with http.get(place) as answer:
                    await raise_for_problem(answer)
                    reason = (await read_json_answer(answer))["reason"]
                if reason is not None:
                    return str(reason["sentence"])
    return session.why()
