"""TLS in front of a service and of its WebSockets, on both loops; what goes wrong; new certificates while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry

from keepstep_mesh.errors import AuthError
from keepstep_mesh.net.http import client_session
from keepstep_mesh.security.certificate_end import end_of
from keepstep_mesh.security.request_errors import explained
from keepstep_mesh.security.tls import TlsError, TlsFiles, as_safe
from keepstep_mesh.security.tokens import Tokens
from keepstep_mesh.serving import service
from keepstep_mesh.serving.service import Endpoint, Service, serving
from keepstep_mesh.testing import DEADLINE
from tests.services.mesh.security.tls_driver import (
    VERSIONS,
    Peer,
    both_loops,
    on,
    running,
)
from tests.support.network.certificates import Authority


async def healthz(url: str, tls: TlsFiles) -> str:
    """ "ok", or what a client says went wrong."""
    try:
        async with client_session(tls=tls.client_context()) as http, http.get(f"{url}/healthz") as response:
            return str((await response.json())["status"])
    except (aiohttp.ClientError, OSError) as error:
        return explained(error, url)


# ---- who is let in


@both_loops
def test_a_client_that_trusts_the_ca_is_served_and_another_learns_why_not(loop: str, tmp_path: Path) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    mutual = ours.service(mutual=True)
    cases: list[tuple[TlsFiles | None, TlsFiles, str]] = [
        (ours.service(), ours.trusted(), "ok"),
        (ours.service(), ours.client(), "ok"),
        (mutual, ours.client(), "ok"),
        (ours.service(), other.trusted(), "not from a CA that is trusted here; give that CA with KEEPSTEP_TLS_CA"),
        (ours.service(), TlsFiles(), "not from a CA that is trusted here; give that CA with KEEPSTEP_TLS_CA"),
        (TlsFiles(other.self_signed()), ours.trusted(), "signed by itself; put that one into KEEPSTEP_TLS_CA"),
        (TlsFiles(ours.certificate("127.0.0.1", days=(-2, -1))), ours.trusted(), "has expired"),
        (TlsFiles(ours.certificate("127.0.0.1", days=(1, 2))), ours.trusted(), "not valid yet; compare the clocks"),
        (TlsFiles(ours.certificate("node7.example")), ours.trusted(), "not for this address; use the name in"),
        (mutual, ours.trusted(), "give one that its CA signed: KEEPSTEP_TLS_CERT"),
        (mutual, TlsFiles(other.client().cert, ca=ours.pem), "give one that its CA signed: KEEPSTEP_TLS_CERT"),
        (None, ours.trusted(), "it does not speak TLS; write http://"),
    ]

    async def scenario() -> None:
        for files, client, says in cases:
            async with running(files) as (endpoint, _):
                assert endpoint.url.startswith("http:" if files is None else "https:")
                assert says in await healthz(f"https://127.0.0.1:{endpoint.port}", client), (files, client)

    on(loop, scenario())


async def test_a_name_that_the_certificate_does_not_have_is_refused(authority: Authority) -> None:
    files = TlsFiles(authority.certificate("127.0.0.1"))
    async with running(files) as (endpoint, _):
        assert "not for this name" in await healthz(f"https://localhost:{endpoint.port}", authority.trusted())
        assert await healthz(endpoint.url, authority.trusted()) == "ok"


@both_loops
def test_plain_http_to_a_tls_port_is_advised_to_use_https(loop: str, authority: Authority) -> None:
    async def scenario() -> None:
        async with running(authority.service()) as (endpoint, _):
            url = endpoint.url.replace("https", "http")
            assert "if it speaks TLS, write https://" in await healthz(url, authority.trusted())

    on(loop, scenario())


@pytest.mark.parametrize("version", VERSIONS)
async def test_an_alert_of_another_implementation_is_explained(version: str, authority: Authority) -> None:
    # asyncio's server ends the connection without a word; others, a proxy say, send an alert that says what they miss.
    context = authority.service(mutual=True).server_context()
    context.maximum_version = VERSIONS[version]

    def refuse(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it was shut down
            while True:
                connection, _ = listener.accept()
                with connection, pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
                    context.wrap_socket(connection, server_side=True)

    with ThreadPoolExecutor(1) as thread, socket.create_server(("127.0.0.1", 0)) as listener:
        thread.submit(refuse, listener)
        said = await healthz(f"https://127.0.0.1:{listener.getsockname()[1]}", authority.trusted())
        listener.shutdown(socket.SHUT_RDWR)
    assert "give one that its CA signed" in said


def test_an_error_without_tls_keeps_its_text() -> None:
    for error, says in (
        (ConnectionResetError("closed by the peer: evicted"), "closed by the peer: evicted"),
        (TimeoutError(), "no answer in time"),
        (TimeoutError("no answer within 5 s"), "no answer within 5 s"),
    ):
        assert explained(error, "http://x:1") == explained(error, "https://x:1") == says


def test_a_redirect_from_a_tls_address_stays_on_tls() -> None:
    assert as_safe("http://leader:1", "https://a:1") == "https://leader:1"
    assert as_safe("https://leader:1", "https://a:1/v1/jobs") == "https://leader:1"
    for address in ("http://leader:1", "https://leader:1"):
        assert as_safe(address, "http://a:1") == address


def test_nothing_older_than_tls_1_2_is_spoken(authority: Authority) -> None:
    for context in (authority.service().server_context(), authority.client().client_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    client = authority.client().client_context()
    assert client.check_hostname
    assert client.verify_mode is ssl.CERT_REQUIRED


async def test_a_connection_that_begins_no_handshake_is_cut(authority: Authority) -> None:
    async with running(authority.service(), first_request_seconds=0.2) as (endpoint, _):
        reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
        async with asyncio.timeout(DEADLINE):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        writer.close()


@both_loops
def test_rubbish_and_broken_handshakes_disturb_nobody(loop: str, authority: Authority, caplog) -> None:
    hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"  # the beginning of a ClientHello

    async def scenario() -> None:
        async with running(authority.service()) as (endpoint, _):
            for sent in (b"", b"\0", b"\xff" * 100_000, hello, hello + b"\0" * 600, b"GET / HTTP/1.1\r\n\r\n") * 10:
                reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
                writer.write(sent)
                with contextlib.suppress(ConnectionError):
                    writer.write_eof()
                    await reader.read()
                writer.transport.abort()
            assert await healthz(endpoint.url, authority.trusted()) == "ok"

    on(loop, scenario())
    assert not [one for one in caplog.records if one.levelname == "ERROR"]


# ---- files that cannot be used


def test_a_file_that_cannot_be_used_is_named_with_what_to_do(authority: Authority, tmp_path: Path) -> None:
    good, another = authority.certificate("a.example"), authority.certificate("b.example")
    rubbish, none = tmp_path / "rubbish.pem", tmp_path / "none.pem"
    rubbish.write_text("rubbish\n")
    for files, says in (
        (TlsFiles(none), f"{none} cannot be read: No such file"),
        (TlsFiles(good, none), f"{none} cannot be read: No such file"),
        (TlsFiles(good, another), f"the key {another} is not that of the certificate {good}"),
        (TlsFiles(rubbish), "no certificate and key in PEM .*docs/security.md"),
        (TlsFiles(authority.pem), "no certificate and key in PEM"),
        (TlsFiles(good, ca=none), f"the CA file {none} cannot be read"),
        (TlsFiles(good, ca=rubbish), f"{rubbish} holds no CA certificate"),
        (TlsFiles(key=good), "has no certificate: give --tls-cert too"),
    ):
        for make in (files.server_context, files.client_context):
            if make == files.server_context and files.cert is None:
                continue
            with pytest.raises(TlsError, match=says):
                make()
    with pytest.raises(TlsError, match="TLS needs a certificate: give --tls-cert"):
        TlsFiles(ca=authority.pem).server_context()


async def test_a_service_whose_files_are_bad_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(TlsError, match="cannot be read"):
        async with running(TlsFiles(tmp_path / "none.pem")):
            pass


async def test_certificates_do_not_stand_in_for_tokens_beyond_loopback(authority: Authority) -> None:
    with pytest.raises(AuthError, match="without a token"):
        async with serving(Service("test", []), "0.0.0.0", 0, tls=authority.service(mutual=True)):
            pass


async def test_tokens_that_travel_in_plain_text_are_worth_a_warning(authority: Authority, caplog) -> None:
    tokens = Tokens(worker="w" * 20)
    async with serving(Service("test", []), "0.0.0.0", 0, tokens=tokens):
        assert "tokens are sent unencrypted" in caplog.text
    caplog.clear()
    async with serving(Service("test", []), "0.0.0.0", 0, tokens=tokens, tls=authority.service()):
        assert "tokens are sent unencrypted" not in caplog.text


# ---- new certificates while it runs


async def serial(endpoint: Endpoint, client: TlsFiles) -> str:
    """Of the certificate that a new connection is shown."""
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=client.client_context())
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in await reader.readline()
        return str(writer.get_extra_info("peercert")["serialNumber"])
    finally:
        writer.transport.abort()


async def until(true: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    """For what no message tells."""
    async with asyncio.timeout(DEADLINE):
        while not await true():  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.01)


async def test_the_end_of_the_certificate_in_use_is_a_metric_that_follows_a_new_one(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "FILE_CHECK_SECONDS", 0.05)
    cert = authority.certificate("localhost", "127.0.0.1", days=(-1, 10))
    registry = CollectorRegistry()

    async def days() -> float:
        at = registry.get_sample_value("keepstep_certificate_end_timestamp_seconds")
        assert at is not None
        return (at - time.time()) / 86400

    async def longer() -> bool:
        return await days() > 50

    async with serving(Service("test", [], registry=registry), "127.0.0.1", 0, tls=TlsFiles(cert)):
        assert 9 < await days() <= 10
        authority.certificate("127.0.0.1", days=(-1, 60)).replace(cert)
        await until(longer)


def test_the_end_of_a_chain_is_that_of_the_certificate_that_ends_first(authority: Authority) -> None:
    first, second = (authority.certificate("localhost", days=(-1, days)).read_text() for days in (9000, 20))
    now = time.time()
    ends = [end_of(pem) for pem in (first, second, first + second, "no certificate")]
    assert ends[3] is None
    assert [round(((end or 0) - now) / 86400) for end in ends[:3]] == [9000, 20, 20]


@both_loops
def test_a_new_certificate_is_shown_to_who_comes_and_who_is_in_stays(loop: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(service, "FILE_CHECK_SECONDS", 0.05)
    ours, new = Authority(tmp_path), Authority(tmp_path, "new")
    files = ours.service(mutual=True)
    assert files.cert is not None

    async def refused(endpoint: Endpoint, client: TlsFiles) -> bool:
        try:
            await serial(endpoint, client)
        except (ssl.SSLError, ConnectionError, AssertionError):
            return True
        return False

    async def scenario() -> None:
        async with running(files) as (endpoint, peers), client_session(tls=ours.client().client_context()) as http:
            worker = Peer()
            await worker.link.connect(http, f"{endpoint.url}/link")
            first, old = await serial(endpoint, ours.client()), ours.client()

            async def shown_another() -> bool:
                return await serial(endpoint, old) != first

            ours.certificate("127.0.0.1").replace(files.cert)
            await until(shown_another)
            second = await serial(endpoint, ours.client())

            # A removed CA admits no client any more.
            new.pem.replace(ours.pem)
            new.certificate("127.0.0.1").replace(files.cert)
            shows_new = TlsFiles(new.client().cert, ca=ours.pem)

            async def new_is_in() -> bool:
                return not await refused(endpoint, shows_new)

            await until(new_is_in)
            assert await serial(endpoint, shows_new) not in (first, second)
            assert await refused(endpoint, TlsFiles(old.cert, ca=ours.pem))

            worker.link.send(b"still here")
            assert await worker.frames.get() == b"still here"
            assert peers.qsize() == 1
            worker.link.abort("the test is over")

    on(loop, scenario())


async def test_a_broken_new_certificate_is_reported_and_the_old_one_stays(authority: Authority, caplog) -> None:
    files, reload = authority.service(), asyncio.Event()
    assert files.cert is not None

    async def reported() -> bool:
        return "the old one still counts" in caplog.text

    async with running(files, reload=reload) as (endpoint, _), asyncio.timeout(DEADLINE):
        before = await serial(endpoint, authority.trusted())
        files.cert.write_text("rubbish\n")
        reload.set()
        await until(reported)
        assert await serial(endpoint, authority.trusted()) == before
