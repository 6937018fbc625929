"""Report stragglers to the lighthouse, for jobs whose policy drains them.

The core knows the stragglers, and since how many steps; the policy has the limit (``drain_straggler_after``). The
lighthouse decides whether the job can do without the group now, and may refuse.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from urllib.parse import quote

import aiohttp

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import Identity, answer_of_leader, raise_for_problem, read_json_answer
from keepstep_mesh.security.request_errors import explained
from keepstep_metrics.history.findings import straggler_view
from keepstep_metrics.history.job import Job
from keepstep_metrics.lighthouse.live_status import ANSWER_SECONDS

STRAGGLER_CHECK_SECONDS = 1.0
DRAIN_RETRY_SECONDS = 30.0
"""Pause after a refusal, or without an answer."""

log = get_logger("keepstep.metrics.draining")


class Drainer:
    """``jobs``: the jobs of the core. ``address`` returns the address of the lighthouse; None: not registered."""

    def __init__(self, jobs: Mapping[str, Job], address: Callable[[], str | None], identity: Identity) -> None:
        self._jobs = jobs
        self._address = address
        self._identity = identity
        self._again_at: dict[str, float] = {}

    async def run(self) -> None:
        """Look for stragglers, until cancelled."""
        while True:
            await asyncio.sleep(STRAGGLER_CHECK_SECONDS)
            now = time.monotonic()
            self._again_at = {job: t for job, t in self._again_at.items() if now < t}
            for job in [*self._jobs.values()]:
                address = self._address()
                if address is None or job.name in self._again_at or job.straggler(0) is None:
                    continue
                try:
                    await self._look(address, job)
                except (aiohttp.ClientError, KeepstepError, OSError, LookupError, TypeError, ValueError) as error:
                    self._again_at[job.name] = now + DRAIN_RETRY_SECONDS
                    log.warning("could not drain a straggler; retrying", job=job.name, reason=explained(error, address))

    async def _look(self, address: str, job: Job) -> None:
        path = f"/v1/jobs/{job.name}"
        async with self._identity.session(timeout=ANSWER_SECONDS) as http:
            async with http.get(f"{address}{path}") as answer:
                await raise_for_problem(answer)
                after = (await read_json_answer(answer))["policy"]["drain_straggler_after"]
            group = job.straggler(after) if after else None
            if group is None:
                return
            found = straggler_view.stragglers_view(job)
            report = next(one for one in found.groups if one.name == group.name)
            order = f"{path}/replicas/{quote(group.replica_id, safe='')}/straggler"
            body = {"steps": report.steps, "seconds": report.seconds, "median_seconds": found.median_seconds}
            async with answer_of_leader(http, "POST", address, order, json=body) as answer:
                await raise_for_problem(answer)
