"""One way to run a service: ports, health, errors, tokens, signals and stopping."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter

from keepstep_mesh.errors import AuthError, ProtocolError
from keepstep_mesh.net.http import PROBLEM_JSON, Problem, client_session, raise_for_problem
from keepstep_mesh.security.tokens import Access, Tokens
from keepstep_mesh.serving import application
from keepstep_mesh.serving.application import ROLE, Route, read_json
from keepstep_mesh.serving.open_port import BindError
from keepstep_mesh.serving.service import Service, serving
from keepstep_mesh.testing import DEADLINE

WORKER, ADMIN = "w" * 20, "a" * 20


async def echo(request: web.Request) -> web.Response:
    return web.json_response(await read_json(request))


async def who(request: web.Request) -> web.Response:
    return web.json_response({"role": request[ROLE].value})


def failing(error: Exception):
    async def fail(_request: web.Request) -> web.Response:
        raise error

    return fail


def routes() -> list[Route]:
    return [
        Route("POST", "/echo", echo, Access.READ),
        Route("GET", "/who", who, Access.READ),
        Route("POST", "/evict", who, Access.ADMIN),
        Route("GET", "/conflict", failing(Problem(409, "taken by r1", holder="r1")), Access.READ),
        Route("GET", "/protocol", failing(ProtocolError("hello.version must be an integer")), Access.READ),
        Route("GET", "/broken", failing(RuntimeError("inside")), Access.READ),
    ]


@asynccontextmanager
async def running(**changes) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    tokens, token = changes.pop("tokens", None), changes.pop("token", None)
    service = Service("test", routes(), **changes)
    async with (
        serving(service, "127.0.0.1", 0, tokens=tokens, stop_seconds=DEADLINE) as endpoint,
        client_session(token) as http,
    ):
        yield endpoint.url, http


async def test_malformed_requests_are_one_line_of_the_log_that_commands_no_terminal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as (url, http):
        for sent in (b"GET / HTTP/1.1\r\nbad \x1b[2J header\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n") * 3:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(sent)
            async with asyncio.timeout(DEADLINE):
                assert b"400" in await reader.readline()
                await reader.read()
            writer.close()
            await writer.wait_closed()
        async with http.get(f"{url}/broken") as answer:
            assert answer.status == 500
    malformed = [one for one in caplog.records if "malformed request from 127.0.0.1" in one.getMessage()]
    assert len(malformed) == 1
    assert malformed[0].exc_info is None
    assert malformed[0].getMessage().isprintable()
    assert any("inside" in str(one.exc_info) for one in caplog.records), "other faults have their traceback"


async def test_a_json_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "BODY_SECONDS", 0.1)
    async with serving(Service("test", routes()), "127.0.0.1", 0) as endpoint:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(b'POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"a"')
        async with asyncio.timeout(DEADLINE):
            assert b" 408 " in await reader.readline()
            await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_port_zero_is_any_free_one_and_it_is_told() -> None:
    async with running() as (url, http), http.get(f"{url}/healthz") as response:
        answer = await response.json()
        assert abs(answer.pop("time") - time.time()) < 60
        assert answer == {"status": "ok", "service": "test"}


@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"])
async def test_a_connection_that_asks_nothing_is_cut(sent: bytes) -> None:
    async with serving(Service("test", []), "127.0.0.1", 0, first_request_seconds=1.0) as endpoint:
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        writer.write(sent)
        async with asyncio.timeout(DEADLINE), client_session() as http:
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            async with http.get(f"{endpoint.url}/healthz") as response:
                assert response.status == 200
        writer.close()


async def test_a_taken_port_says_what_to_do_and_starts_nothing() -> None:
    entered = []

    @asynccontextmanager
    async def lifespan():
        entered.append(True)
        yield

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            BindError, match=rf"test cannot listen on 127\.0\.0\.1:{port}: address in use.*another port"
        ):
            async with serving(Service("test", [], lifespan), "127.0.0.1", port):
                pass
    assert not entered


async def test_an_address_that_this_machine_does_not_have_is_a_clear_error() -> None:
    with pytest.raises(BindError, match=r"203\.0\.113\.1:0"):
        async with serving(Service("test", []), "203.0.113.1", 0, insecure=True):
            pass


async def test_it_does_not_listen_to_the_world_without_a_token() -> None:
    with pytest.raises(AuthError, match=r"refusing to listen on 0\.0\.0\.0 without a token"):
        async with serving(Service("test", []), "0.0.0.0", 0):
            pass
    async with serving(Service("test", []), "0.0.0.0", 0, insecure=True):
        pass
    async with serving(Service("test", []), "0.0.0.0", 0, tokens=Tokens(worker=WORKER)):
        pass


async def test_readiness_is_the_services_own_word() -> None:
    reasons: list[str | None] = [None, "waiting for etcd"]
    async with running(not_ready=lambda: reasons[0]) as (url, http):
        async with http.get(f"{url}/readyz") as response:
            assert response.status == 200
        reasons.reverse()
        async with http.get(f"{url}/readyz") as response:
            assert response.status == 503
            assert (await response.json())["detail"] == "waiting for etcd"


async def test_metrics_are_prometheus_text() -> None:
    registry = CollectorRegistry()
    Counter("quorums", "announced", registry=registry).inc(3)
    async with running(registry=registry) as (url, http), http.get(f"{url}/metrics") as response:
        assert "quorums_total 3.0" in await response.text()
    async with running() as (url, http), http.get(f"{url}/metrics") as response:
        assert response.status == 404


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/nothing", 404, "path /nothing not found"),
        ("DELETE", "/echo", 405, "it takes POST"),
        ("GET", "/conflict", 409, "taken by r1"),
        ("GET", "/protocol", 400, "hello.version must be an integer"),
        ("GET", "/broken", 500, "its log has the traceback"),
    ],
)
async def test_every_error_is_a_problem_document(method, path, status, says) -> None:
    async with running() as (url, http), http.request(method, url + path) as response:
        assert response.status == status
        assert response.content_type == PROBLEM_JSON
        body = await response.json(content_type=None)
        assert body["status"] == status
        assert says in body["detail"]
        assert "inside" not in body["detail"]


async def test_a_client_that_went_away_is_not_an_error_of_the_service(caplog) -> None:
    service = Service("test", [Route("GET", "/", failing(ConnectionResetError("gone")), Access.OPEN)])
    async with serving(service, "127.0.0.1", 0) as endpoint, client_session() as http, http.get(endpoint.url):
        pass
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


async def test_a_problem_comes_back_as_the_same_problem() -> None:
    async with running() as (url, http), http.get(f"{url}/conflict") as response:
        with pytest.raises(Problem) as raised:
            await raise_for_problem(response)
        assert (raised.value.status, str(raised.value), raised.value.fields) == (409, "taken by r1", {"holder": "r1"})


async def test_an_error_of_something_else_is_a_problem_too() -> None:
    async def teapot(_request: web.Request) -> web.Response:
        return web.Response(status=418, text="short and stout")

    service = Service("test", [Route("GET", "/", teapot, Access.OPEN)])
    async with (
        serving(service, "127.0.0.1", 0) as endpoint,
        client_session() as http,
        http.get(endpoint.url) as response,
    ):
        with pytest.raises(Problem, match="short and stout"):
            await raise_for_problem(response)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff", 400),
        (b"[" * 100_000, 400),
        (b"x" * 300_000, 413),
        (b"", 200),
        (b'{"a":1}', 200),
    ],
)
async def test_bodies_are_json_objects_of_bounded_size(body, status) -> None:
    async with running(max_body_bytes=200_000) as (url, http), http.post(f"{url}/echo", data=body) as response:
        assert response.status == status
        assert isinstance(await response.json(content_type=None), dict)


async def test_a_body_that_is_not_packed_as_it_says_is_a_bad_request() -> None:
    async with (
        running() as (url, http),
        http.post(f"{url}/echo", data=b"{}", headers={"Content-Encoding": "gzip"}) as response,
    ):
        assert response.status == 400
        assert "the body cannot be read" in (await response.json())["detail"]


async def test_the_table_decides_who_may() -> None:
    tokens = Tokens(worker=WORKER, admin=ADMIN)
    for token, read, evict in ((None, 401, 401), ("x" * 20, 401, 401), (WORKER, 200, 403), (ADMIN, 200, 200)):
        async with running(tokens=tokens, token=token) as (url, http):
            for method, path, status in (("GET", "/who", read), ("POST", "/evict", evict), ("GET", "/healthz", 200)):
                async with http.request(method, url + path) as response:
                    assert response.status == status, (token, path)
                    assert (response.headers.get("WWW-Authenticate") == "Bearer") == (status == 401)
                    if status >= 400:
                        with pytest.raises(AuthError, match=url):
                            await raise_for_problem(response)


async def test_a_stop_lets_a_running_request_finish() -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def slow(_request: web.Request) -> web.Response:
        began.set()
        await go.wait()
        return web.Response(text="finished")

    stop = asyncio.Event()
    started: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def lifespan():
        yield
        go.set()

    async def serve() -> None:
        service = Service("test", [Route("GET", "/", slow, Access.OPEN)], lifespan)
        async with serving(service, "127.0.0.1", 0, stop_seconds=DEADLINE) as endpoint:
            started.set_result(endpoint.url)
            await stop.wait()

    async with asyncio.TaskGroup() as group, client_session() as http:
        group.create_task(serve())
        url = await started
        request = group.create_task(http.get(url).__aenter__())
        await began.wait()
        stop.set()
        response = await request
        assert await response.text() == "finished"


async def test_a_stop_that_takes_too_long_is_cut_off() -> None:
    cancelled = []

    @asynccontextmanager
    async def lifespan():
        yield
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async with serving(Service("test", [], lifespan), "127.0.0.1", 0, stop_seconds=0.05):
        pass
    assert cancelled


async def test_an_error_inside_is_not_taken_for_a_slow_stop() -> None:
    with pytest.raises(TimeoutError, match="ours"):
        async with serving(Service("test", []), "127.0.0.1", 0):
            raise TimeoutError("ours")


PROGRAM = """
import sys
from contextlib import asynccontextmanager
from keepstep_mesh.config import logging
from keepstep_mesh.serving.listen_settings import ListenSettings
from keepstep_mesh.serving.process import Hosted, run_services
from keepstep_mesh.serving.service import Service

@asynccontextmanager
async def lifespan():
    yield
    print("ended", flush=True)

logging.configure(as_json=True)
one = Hosted(lambda: Service("test", [], lifespan), ListenSettings(), lambda at: print(at.url, flush=True))
run_services([one], uvloop=sys.argv[1] == "uvloop")
"""


STUCK = PROGRAM.replace('    print("ended", flush=True)', "    threading.Event().wait()").replace(
    "logging.configure(as_json=True)",
    "import threading\nfrom keepstep_mesh.serving import process\nprocess.STOP_SECONDS = process.END_SECONDS = 0.1",
)


async def test_a_process_whose_stop_waits_for_a_stuck_thread_ends_all_the_same() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", STUCK, "asyncio", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with asyncio.timeout(DEADLINE):
            await process.stdout.readline()  # it serves
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == -signal.SIGALRM
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_process_serves_until_a_signal_and_ends_in_good_order(loop, number) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, loop, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(DEADLINE):
            url = (await process.stdout.readline()).decode().strip()
            async with client_session() as http, http.get(f"{url}/healthz") as response:
                assert response.status == 200
            process.send_signal(number)
            out, err = await process.communicate()
        assert process.returncode == 0
        assert out == b"ended\n"
        events = [json.loads(line)["event"] for line in err.splitlines()]
        assert events == ["service started", "no token is set", "stopping", "service stopped"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
