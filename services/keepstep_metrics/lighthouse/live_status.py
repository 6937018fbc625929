"""Poll the lighthouse and the relays for live status: the next quorum's reason to wait, progress of heals and uploads.

They are polled only while a client reads the job; none of this goes into the history, as it changes many times a
second. Operators' orders are forwarded to the lighthouse with the operator's token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs, web

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import Identity, Problem, answer_of_leader, raise_for_problem, read_answer, read_json_answer
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.security.request_errors import explained
from keepstep_mesh.security.tls import TlsFiles, as_safe
from keepstep_mesh.serving.application import read_whole
from keepstep_metrics.lighthouse.service_vitals import Vitals, VitalsReader

ANSWER_SECONDS = 5.0
"""Limit for an answer of the lighthouse."""
REPLICAS_SECONDS = 5.0
LOOKED_AT_SECONDS = 10.0
"""Stop polling a job that no client has read for this time."""
RELAY_STATUS_SECONDS = 1.0
UNDER_WAY = ("begun", "planned", "uploading")
"""States of a checkpoint at a relay."""

log = get_logger("keepstep.metrics.lighthouse")


@dataclass(frozen=True, slots=True)
class LiveHeal:
    bytes_done: int
    bytes_total: int
    bytes_per_second: float
    seconds_left: float | None
    via: str
    source: str


@dataclass(frozen=True, slots=True)
class LiveCopies:
    """The copies of a member of a job whose model exists once."""

    keepers: tuple[str, ...]
    """Stable names of the groups that keep copies of its shards, or should."""
    exposed: str
    """Why it has no copies at a keeper, as a sentence; empty: it has."""
    bytes: int
    """Size of the copies that it keeps of others."""

    @classmethod
    def of(cls, shards: Mapping[str, Any]) -> LiveCopies:
        """Read ``shards`` of a replica object of a lighthouse."""
        exposed = "; ".join(
            f"its keeper {name_of(hole['keeper'])} has no copies: {hole['reason']}"
            if hole["keeper"]
            else hole["reason"]
            for hole in shards["exposed"]
        )
        return cls(tuple(map(name_of, shards["keepers"])), exposed, shards["copies_bytes"])


@dataclass(frozen=True, slots=True)
class LiveUpload:
    name: str
    """Id of the checkpoint."""
    step: int
    began: float
    bytes_done: int
    bytes_total: int
    bytes_per_second: float
    relay: str
    """Name of the relay."""

    @property
    def seconds_left(self) -> float | None:
        left = self.bytes_total - self.bytes_done
        return left / self.bytes_per_second if self.bytes_per_second > 0 else None


@dataclass(frozen=True, slots=True)
class StateOfJob:
    """The lighthouse's state of a job."""

    code: str
    """``running``, ``standing``, ``finishing``, ``closed``, ``finished``, ``failed``, ``stopped`` or ``abandoned``."""
    step: int
    since: float
    """Unix time."""
    why: str

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> StateOfJob | None:
        """Read the job object of a lighthouse; None: an older release, which does not have the state."""
        one = job.get("state")
        return one and cls(one["code"], one["step"], one["since"], one["why"])


@dataclass(frozen=True, slots=True)
class Live:
    """Live status of one job, from the last poll."""

    waiting_for: str | None = None
    joining: tuple[str, ...] = ()
    heals: dict[str, LiveHeal] = field(default_factory=dict)
    """By stable name."""
    uploads: tuple[LiveUpload, ...] = ()
    needs: int | None = None
    """``min_replicas``; None: unknown."""
    state: StateOfJob | None = None
    kept_out: tuple[str, ...] = ()
    """Banned and evicted names, as ordered."""
    hosts: dict[str, str] = field(default_factory=dict)
    copies: dict[str, LiveCopies] = field(default_factory=dict)
    """By stable name, as ``hosts``."""
    hangs: tuple[str, ...] = ()
    """Ranks that hold up the job for longer than usual, and in which line; each a sentence."""


class LiveStatusPoller:
    """``address`` returns the address of the lighthouse; None: not registered. ``on_change`` gets the name of a job."""

    def __init__(
        self,
        address: Callable[[], str | None],
        identity: Identity,
        tls: TlsFiles,
        on_change: Callable[[str], None],
    ) -> None:
        self._address = address
        self._identity = identity
        self._for_others = Identity(None, tls)
        self._on_change = on_change
        self._live: dict[str, Live] = {}
        self._looked: dict[str, float] = {}
        self._replicas_of: dict[str, tuple[float, Any, tuple[dict[str, str], dict[str, LiveCopies]]]] = {}
        """Job -> when its replicas were asked for (monotonic), the news of the quorum then, and ``_replicas``."""
        self._vitals = VitalsReader(identity)
        self._failures_logged = LogLimiter()

    def live(self, job: str) -> Live:
        """Return the last status, and poll the job from now on."""
        self._looked[job] = time.monotonic()
        return self._live.get(job, NOTHING)

    async def run(self) -> None:
        """Poll, until cancelled."""
        while True:
            await asyncio.sleep(0.5)
            now = time.monotonic()
            self._looked = {job: t for job, t in self._looked.items() if now - t < LOOKED_AT_SECONDS}
            self._replicas_of = {job: known for job, known in self._replicas_of.items() if job in self._looked}
            self._live = {job: live for job, live in self._live.items() if job in self._looked}
            address = self._address()
            if address is None or not self._looked:
                continue
            try:
                async with self._identity.session(timeout=ANSWER_SECONDS) as http:
                    services = (await _get(http, f"{address}/v1/cluster"))["services"]
                    relays = {
                        one["name"]: as_safe(one["address"], address) for one in services if one["kind"] == "relay"
                    }
                    for job in [*self._looked]:
                        await self._ask(http, address, job, relays)
            except (aiohttp.ClientError, KeepstepError, OSError, LookupError, TypeError, AttributeError) as error:
                self._live.clear()
                if self._failures_logged.allows(now):
                    log.warning("could not poll the lighthouse; retrying", reason=explained(error, address))

    async def _ask(self, http: aiohttp.ClientSession, address: str, job: str, relays: Mapping[str, str]) -> None:
        asked = await asyncio.gather(
            *(_uploads(http, name, url, job, self._identity.headers_for("relay", url)) for name, url in relays.items())
        )
        uploads = tuple(one for of_relay in asked for one in of_relay)
        try:
            quorum = await _get(http, f"{address}/v1/jobs/{job}/quorum")
            heals = (await _get(http, f"{address}/v1/jobs/{job}/transfers"))["heals"]
            about = await _get(http, f"{address}/v1/jobs/{job}")
            hosts, copies = await self._replicas(http, address, job, quorum)
        except Problem as problem:
            if problem.status != 404:
                raise
            live = Live(uploads=uploads)  # the job has ended
        else:
            members, asking = {*quorum["members"]}, quorum["asking"]
            live = Live(
                quorum["reason"]["sentence"] if asking else None,
                tuple(sorted(name_of(one) for one in asking if one not in members)),
                {
                    name_of(one["replica_id"]): LiveHeal(
                        one["bytes_done"],
                        one["bytes_total"],
                        one["bytes_per_second"],
                        one["seconds_left"],
                        one["via"],
                        name_of(one["source"]),
                    )
                    for one in heals
                },
                uploads,
                about["policy"]["min_replicas"],
                _steady(StateOfJob.of(about)),
                tuple(sorted({*about["evicted"], *(one["target"] for one in about["bans"])})),
                hosts,
                copies,
                tuple(quorum["hangs"]),
            )
        if live != self._live.get(job, NOTHING):
            self._live[job] = live
            self._on_change(job)

    async def _replicas(
        self, http: aiohttp.ClientSession, address: str, job: str, quorum: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[str, LiveCopies]]:
        """Return hosts and copies of the groups; asked again after ``REPLICAS_SECONDS`` or with news of the quorum."""
        now, news = time.monotonic(), [quorum[key] for key in ("quorum_id", "exposed", "copies_bytes")]
        asked_at, known, found = self._replicas_of.get(job, (-REPLICAS_SECONDS, None, ({}, {})))
        if known != news or now - asked_at >= REPLICAS_SECONDS:
            replicas = (await _get(http, f"{address}/v1/jobs/{job}/replicas"))["replicas"][
                ::-1
            ]  # the newest of a name last
            hosts = {one["name"]: host for one in replicas if (host := urlsplit(one["address"]).hostname)}
            copies = {one["name"]: LiveCopies.of(one["shards"]) for one in replicas if one["member"] and one["shards"]}
            found = hosts, copies
            self._replicas_of[job] = now, news, found
        return found

    async def cluster(self) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Vitals]]:
        """Return the lighthouse's answers to ``GET /v1/cluster`` and ``GET /v1/jobs``, and vitals by address.

        Raises:
            Problem: The lighthouse is unreachable.
        """
        address = self._known()
        try:
            async with self._identity.session(timeout=ANSWER_SECONDS) as http:
                found, jobs = await _get(http, f"{address}/v1/cluster"), await _get(http, f"{address}/v1/jobs")
            places = [("lighthouse", as_safe(one["address"], address)) for one in found["nodes"]]
            places += [(one["kind"], as_safe(one["address"], address)) for one in found["services"]]
            return found, jobs["jobs"], await self._vitals.read(places)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Problem(502, f"lighthouse unreachable: {explained(error, address)}") from error

    async def pass_on(self, request: web.Request) -> web.Response:
        """Forward an order to the leader with the client's token, and return the leader's answer."""
        body, address = await read_whole(request), self._known()
        headers = {name: request.headers[name] for name in (hdrs.AUTHORIZATION,) if name in request.headers}
        headers[hdrs.CONTENT_TYPE] = "application/json"
        try:
            async with self._for_others.session(timeout=ANSWER_SECONDS) as http:
                path = request.rel_url.raw_path
                async with answer_of_leader(http, request.method, address, path, data=body, headers=headers) as answer:
                    text = await read_answer(answer)
                    return web.Response(body=text, status=answer.status, content_type=answer.content_type)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Problem(502, f"lighthouse unreachable: {explained(error, address)}") from error

    def _known(self) -> str:
        if (address := self._address()) is None:
            raise Problem(503, "not registered with a lighthouse: start with --lighthouse", retry_after=5.0)
        return address


NOTHING = Live()


def _steady(state: StateOfJob | None) -> StateOfJob | None:
    """Return the state without the step of a running job, and with whole seconds: both change at each poll."""
    if state is None:
        return None
    return replace(state, step=0 if state.code == "running" else state.step, since=float(round(state.since)))


async def _uploads(
    http: aiohttp.ClientSession, relay: str, url: str, job: str, headers: Mapping[str, str]
) -> list[LiveUpload]:
    """Return the open uploads at one relay; none if it does not answer or sends nonsense."""
    try:
        async with asyncio.timeout(RELAY_STATUS_SECONDS):
            found = (await _get(http, f"{url}/v1/jobs/{job}/checkpoints", headers))["checkpoints"]
        return [
            LiveUpload(
                one["id"],
                one["step"],
                one["begun"],
                one["bytes"] - one["lacking_bytes"],
                one["bytes"],
                one["bytes_per_second"],
                relay,
            )
            for one in found
            if one["state"] in UNDER_WAY
        ]
    except (aiohttp.ClientError, KeepstepError, OSError, LookupError, TypeError) as error:
        log.debug("could not poll a relay", relay=relay, reason=explained(error, url))
        return []


async def _get(http: aiohttp.ClientSession, url: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    async with http.get(url, headers=headers, allow_redirects=False) as answer:
        await raise_for_problem(answer)
        return await read_json_answer(answer)
