"""Log the reason why a quorum takes long, before the request for it times out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from urllib.parse import quote

import aiohttp

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import raise_for_problem, read_json_answer

log = get_logger("keepstep.group")

SLOW_QUORUM_SECONDS = 5.0
"""A wait for a quorum that takes longer is logged."""
ANSWER_SECONDS = 5.0
"""Limit for the lighthouse to answer with the reason."""


class SlowQuorumLog:
    """Asks the lighthouse for the reason, in the background.

    Args:
        session: with the lighthouse.
        replica_id: of this group.
        run: starts the request to the lighthouse as a task, and owns it.
    """

    def __init__(
        self, session: LighthouseSession, replica_id: str, run: Callable[[Coroutine[object, object, None]], object]
    ) -> None:
        self._session = session
        self._replica_id = replica_id
        self._run = run
        self._reasons_logged = LogLimiter()
        self._waits = 0
        self._since: float | None = None
        """When the present wait began, a time of the event loop; None: this group does not wait."""
        self._timer_is_set = False
        self._stands_by = False
        """It was logged that this group is a spare."""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Mark the time in which this group waits for a quorum."""
        self._waits += 1
        self._since = asyncio.get_running_loop().time()
        self._set_timer(SLOW_QUORUM_SECONDS)
        try:
            yield
        finally:
            self._waits += 1
            self._since = None

    def _set_timer(self, seconds: float) -> None:
        """Look again in so many seconds. One timer serves all waits that begin and end before."""
        if not self._timer_is_set:
            self._timer_is_set = True
            asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer_is_set = False
        if self._since is None:
            return
        now = asyncio.get_running_loop().time()
        if now < self._since + SLOW_QUORUM_SECONDS:
            self._set_timer(self._since + SLOW_QUORUM_SECONDS - now)
        elif self._reasons_logged.allows(now):
            self._run(self._log_reason(self._waits))

    async def _log_reason(self, wait: int) -> None:
        try:
            reason = await _reason(self._session, self._replica_id)
        except (aiohttp.ClientError, OSError, KeepstepError, ValueError, LookupError) as error:
            reason = f"unknown; the lighthouse did not answer: {str(error) or type(error).__name__}"
        if self._waits == wait and self._session.stands_by:
            if not self._stands_by:
                log.info("standing by", replica_id=self._replica_id, reason=reason)
            self._stands_by = True
        elif self._waits == wait:
            log.warning("waiting for a quorum", replica_id=self._replica_id, reason=reason)


async def _reason(session: LighthouseSession, replica_id: str) -> str:
    """Return why the group waits, or else why the job does. Raises like any request over HTTP."""
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
