"""A false relay or metrics service learns no token from its clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from keepstep_mesh.discovery.registration import Registration, registered
from keepstep_mesh.net.http import Problem, client_session
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tokens import Tokens, derived, place_of, watched_tokens
from tests.services.cli.scene import keepstep
from tests.services.manager.groups import manager
from tests.services.relay.test_relay_access import ACCESS, url_of
from tests.support.services.access_table import TOKENS, check_access
from tests.support.services.lighthouse_driver import eventually, lighthouse
from tests.support.services.metrics_driver import metrics
from tests.support.services.relay_driver import DEADLINE, relay

RAW = {str(TOKENS.worker), str(TOKENS.service), str(TOKENS.admin)}


class Listener:
    """An HTTP server that writes down what it is shown, and takes none of it, like a service of an older release."""

    def __init__(self) -> None:
        self.shown: defaultdict[str, set[str]] = defaultdict(set)
        """Bearer tokens that arrived, by the first parts of the path."""
        self.url = ""
        self.location = ""
        """Where to send who comes; empty: it refuses."""

    async def answer(self, request: web.Request) -> web.Response:
        value = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.shown[f"{request.method} {request.path}"].add(value)
        if self.location:
            raise web.HTTPTemporaryRedirect(self.location + str(request.rel_url))
        return Problem(401, "the token is wrong").response()

    @property
    def values(self) -> set[str]:
        return {one for values in self.shown.values() for one in values}

    def was_asked(self, beginning: str) -> bool:
        return any(path.startswith(beginning) for path in self.shown)


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[Listener]:
    one, app = Listener(), web.Application(client_max_size=1 << 28)
    app.router.add_route("*", "/{anything:.*}", one.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield one
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def pretending(kind: str, lighthouse_url: str, name: str = "a-first") -> AsyncIterator[Listener]:
    """It holds a service token, and registers with that."""
    async with listener() as one:
        mine = Registration(kind, name, one.url)
        async with registered([lighthouse_url], mine, token=TOKENS.service) as registrar:
            await eventually(registrar.known.is_set)
            yield one


class Trainer(threading.Thread):
    """Commits steps until it is stopped."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__()
        self.address, self.group = address, name
        self.server = ""
        self.checkpoints = ""
        self.committed = 0
        self.stopping = False
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            state = {"weights": torch.zeros(300_000)}
            with manager(self.address, self.group, state) as one:
                self.server = one._context.link.address
                self.checkpoints = one._context.transport.metadata()
                while not self.stopping:
                    one.start_quorum()
                    self.committed += one.should_commit()
                    time.sleep(0.01)  # the pace of a step, not a wait
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            self.error = error

    async def stop(self) -> None:
        self.stopping = True
        await asyncio.to_thread(self.join, DEADLINE)


async def status(url: str, token: str) -> int:
    async with client_session(token) as http, http.get(url) as answer:
        return answer.status


async def test_a_service_that_listens_in_learns_nothing_that_anybody_else_takes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KEEPSTEP_TOKEN", str(TOKENS.worker))
    async with (
        lighthouse(tokens=TOKENS, policy=Policy(join_timeout=1.0)) as known,
        pretending("relay", known.address) as relay_ear,
        pretending("metrics", known.address) as metrics_ear,
        relay(tokens=TOKENS, lighthouses=(known.address,), name="b-second") as good_relay,
        metrics(tokens=TOKENS, lighthouses=(known.address,), name="b-second") as good_metrics,
    ):
        await eventually(lambda: good_relay.is_registered and good_metrics.is_registered)
        trainers = [Trainer(known.address, "r0")]
        try:
            await eventually(lambda: trainers[0].committed > 3)
            trainers.append(Trainer(known.address, "r1"))  # heals: its source uploads, and it asks the relays
            await eventually(lambda: trainers[1].committed > 3)
            for command in ("transfers", "checkpoint ls"):
                said = await keepstep(*command.split(), "--lighthouse", known.address, KEEPSTEP_TOKEN=str(TOKENS.admin))
                assert "Traceback" not in said.err
            at_relay, at_metrics = place_of("relay", relay_ear.url), place_of("metrics", metrics_ear.url)
            for_relay = {derived(token, at_relay) for token in RAW}
            for_metrics = {derived(token, at_metrics) for token in RAW - {str(TOKENS.admin)}}
            async with asyncio.timeout(DEADLINE):  # until every client with a token has connected
                while len(relay_ear.values) < len(for_relay) or len(metrics_ear.values) < len(for_metrics):
                    good_metrics.asker.live("default")
                    await asyncio.sleep(0.05)
            assert relay_ear.was_asked("POST /v1/jobs/default/checkpoints")
            assert "if it runs an older release, update it first" in caplog.text

            learned = relay_ear.values | metrics_ear.values
            assert not learned & RAW
            assert (relay_ear.values, metrics_ear.values) == (for_relay, for_metrics)
            elsewhere = [
                f"{known.address}/v1/jobs",
                f"{good_relay.address}/v1/jobs/default/checkpoints",
                f"{good_metrics.address}/v1/jobs",
                f"{trainers[0].server}/v1/layout",
                f"{trainers[0].checkpoints}/checkpoint/1",
            ]
            for value in learned:
                for url in elsewhere:
                    assert await status(url, value) == 401, url
            assert [await status(url, str(TOKENS.worker)) for url in elsewhere[:3]] == [200] * 3
        finally:
            await asyncio.gather(*(one.stop() for one in trainers))
        assert [one.error for one in trainers] == [None, None]


ROLES = {"worker": TOKENS.worker, "service": TOKENS.service, "admin": TOKENS.admin}


@pytest.mark.parametrize("role", ROLES)
async def test_a_derived_token_may_what_its_role_may_at_that_service_only(role: str) -> None:
    token = str(ROLES[role])
    async with relay(tokens=TOKENS, allow_host=("gpu-7",)) as one:
        port = one.address.rpartition(":")[2]
        for address in (
            one.address,
            one.address.replace("http", "https"),
            f"http://localhost:{port}",
            f"http://GPU-7:{port}",
        ):
            await check_access(ACCESS, role, one.address, url_of, derived(token, place_of("relay", address)))
        places = (
            place_of("metrics", one.address),
            place_of("relay", "http://127.0.0.1:1"),
            place_of("relay", f"http://evil.example:{port}"),
            "",
        )
        for place in places:
            await check_access(ACCESS, "stranger", one.address, url_of, derived(token, place))


async def test_a_service_that_advertises_another_address_takes_what_is_derived_for_that() -> None:
    async with metrics(tokens=TOKENS, advertise="http://door.example:7") as one:
        value = derived(str(TOKENS.worker), place_of("metrics", "http://door.example:7"))
        assert await status(f"{one.address}/v1/jobs", value) == 200


async def test_while_tokens_are_rotated_what_is_derived_from_either_is_taken(tmp_path: Path) -> None:
    file, old, new = tmp_path / "tokens", "old-" * 5, "new-" * 5
    file.write_text(f"worker = {old}\nworker = {new}\n")
    tokens = watched_tokens({}, file)
    async with relay(tokens=tokens) as one:
        url, place = f"{one.address}/v1/jobs/job/checkpoints", place_of("relay", one.address)
        assert [await status(url, derived(token, place)) for token in (old, new)] == [200, 200]
        file.write_text(f"worker = {new}\n")
        tokens.refresh()
        assert [await status(url, derived(token, place)) for token in (old, new)] == [401, 200]


async def test_a_relay_sends_the_command_line_nowhere(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text(str(TOKENS.admin))
    async with lighthouse(tokens=TOKENS) as known, pretending("relay", known.address) as ear, listener() as beyond:
        ear.location = beyond.url
        at = ("--lighthouse", known.address, "--token-file", str(token))
        for command in (("checkpoint", "ls"), ("checkpoint", "rm", "c1"), ("checkpoint", "ls", "--relay", ear.url)):
            said = await keepstep(*command, *at)
            assert said.code != 0
            assert "not a keepstep relay" in said.err
        assert ear.was_asked("GET ")  # rm looks for the checkpoint first
        assert not beyond.shown


async def test_an_operator_who_names_a_relay_shows_it_the_token_itself() -> None:
    async with relay(tokens=Tokens(admin=TOKENS.admin)) as one:
        found: Any = await keepstep("checkpoint", "ls", "--relay", one.address, KEEPSTEP_TOKEN=str(TOKENS.admin))
        assert found.code == 0, found.err
