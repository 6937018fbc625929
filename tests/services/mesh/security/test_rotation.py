"""New tokens and certificates for processes that go on running."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest
from aiohttp import web

from keepstep.session.lighthouse_session import LighthouseSession
from keepstep.session.session_events import Connected, Disconnected
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.discovery.registration import Registration, registered
from keepstep_mesh.errors import AuthError
from keepstep_mesh.net.http import client_session
from keepstep_mesh.protocol.messages import Leave, NotLeader
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Access, ClientToken, watched_tokens
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Service, serving
from keepstep_mesh.testing import ChaosProxy, scripted_lighthouse
from tests.support.network.certificates import Authority
from tests.support.services.asking_group import Group
from tests.support.services.command import process
from tests.support.services.lighthouse_driver import DEADLINE, eventually, lighthouse

OLD, NEW, ADMIN = "old-" * 5, "new-" * 5, "admin-" * 4


async def nothing(_request: web.Request) -> web.Response:
    return web.Response()


async def status(url: str, token: str, tls: TlsFiles | None = None) -> int:
    context = tls.client_context() if tls else None
    async with client_session(token, tls=context) as http, http.get(url) as response:
        return response.status


# ---- tokens


async def test_during_a_rotation_both_tokens_count_and_after_it_the_new_one(tmp_path: Path) -> None:
    file, reload = tmp_path / "tokens", asyncio.Event()
    file.write_text(f"worker = {OLD}\n")
    described = Service("test", [Route("GET", "/", nothing, Access.READ)])
    tokens = watched_tokens({}, file)
    async with serving(described, "127.0.0.1", 0, tokens=tokens, reload=reload) as endpoint:
        for text, expected in (
            (f"worker = {OLD}\nworker = {NEW}\n", (200, 200)),
            (f"worker = {NEW}\n", (401, 200)),
            (f"rubbish {OLD}\n", (401, 200)),
            ("", (401, 200)),
            (f"worker = {OLD}\n", (200, 401)),
        ):
            file.write_text(text)
            reload.set()
            await eventually(lambda: not reload.is_set())
            async with asyncio.timeout(DEADLINE):
                while (await status(endpoint.url, OLD), await status(endpoint.url, NEW)) != expected:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)  # no answer tells that the next one is another
            assert (await status(endpoint.url, OLD), await status(endpoint.url, NEW)) == expected


async def test_a_group_whose_token_was_replaced_comes_back_with_the_new_one(tmp_path: Path) -> None:
    known, mine = tmp_path / "tokens", tmp_path / "token"
    known.write_text(f"worker = {OLD}\n")
    mine.write_text(f"{OLD}\n")
    tokens, token = watched_tokens({}, known), ClientToken({"KEEPSTEP_TOKEN_FILE": str(mine)})
    async with (
        lighthouse(tokens=tokens) as one,
        ChaosProxy.before(one.address) as proxy,
        Group(proxy.url, token=token) as group,
    ):
        await group.push_of(Connected)
        assert (await group.ask(0)).quorum_id == 1
        known.write_text(f"worker = {NEW}\n")
        assert tokens.refresh()
        mine.write_text(f"{NEW}\n{OLD}\n")
        proxy.cut()
        await group.push_of(Disconnected)
        await group.push_of(Connected)
        await group.ask(1)
        with pytest.raises(AuthError):
            async with Group(one.address, token=OLD):
                pass


# ---- TLS between a group and its lighthouse


async def test_a_group_takes_its_steps_over_mutual_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with lighthouse(tls=authority.service(mutual=True)) as one:
        assert one.address.startswith("https://127.0.0.1:")
        async with Group(one.address, tls=authority.client()) as group:
            assert [(await group.ask(step)).quorum_id for step in range(3)] == [1, 1, 1]
            assert group.session.lighthouse == one.address
            await group.session.leave("done", DEADLINE)


async def test_a_group_that_does_not_come_in_is_told_why(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path), Authority(tmp_path, "other")
    async with lighthouse(tls=authority.service(mutual=True)) as one:
        for files, says in (
            (other.client(), "not from a CA that is trusted here"),
            (authority.trusted(), "give one that its CA signed"),
        ):
            settings = SessionSettings((one.address,), "job", "r0:1", connect_timeout=1.5, tls=files)
            session = LighthouseSession(settings, lambda _: None)
            with pytest.raises(TimeoutError, match=says):
                await session.start()


async def test_a_group_shows_a_new_certificate_when_it_comes_back(tmp_path: Path) -> None:
    ours, new = Authority(tmp_path), Authority(tmp_path, "new")
    service = ours.service(mutual=True)
    mine = ours.client()
    assert mine.cert is not None
    async with (
        lighthouse(tls=service) as first,
        lighthouse(tls=TlsFiles(service.cert, ca=new.pem)) as second,
        ChaosProxy.before(first.address) as proxy,
        Group(proxy.url, second.address, tls=mine) as group,
    ):
        await group.push_of(Connected)
        new.certificate("client.example").replace(mine.cert)
        proxy.refuse()
        await group.push_of(Disconnected)
        back = await group.push_of(Connected)
        assert isinstance(back, Connected)
        assert back.lighthouse == second.address


async def test_a_request_over_tls_is_not_repeated_in_plain_text(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    async with (
        scripted_lighthouse(tls=authority.service()) as first,
        scripted_lighthouse(tls=authority.service()) as leader,
        asyncio.TaskGroup() as tasks,
    ):
        group = Group(first.url, tls=authority.trusted())
        starting = tasks.create_task(group.session.start())
        peer = await first.session(welcome_epoch=None)
        peer.send(NotLeader(leader.url.replace("https", "http")))
        peer = await leader.session()
        await starting
        assert group.session.lighthouse == leader.url
        leaving = tasks.create_task(group.session.leave("done", DEADLINE))
        assert (await peer.say_goodbye()) == Leave("done")
        await leaving
        await group.session.close()


async def test_a_service_registers_over_tls_and_again_with_its_new_token(tmp_path: Path) -> None:
    authority, known, mine = Authority(tmp_path), tmp_path / "tokens", tmp_path / "token"
    known.write_text(f"service = {OLD}\n")
    mine.write_text(f"{OLD}\n")
    tokens, token = watched_tokens({}, known), ClientToken({"KEEPSTEP_TOKEN_FILE": str(mine)})
    relay = Registration("relay", "relay-1", "http://10.0.0.7:29520", ttl=1.0)
    async with (
        lighthouse(tokens=tokens, tls=authority.service(mutual=True)) as one,
        registered([one.address], relay, token=token, tls=authority.client()) as registrar,
        asyncio.timeout(DEADLINE),
    ):
        await registrar.known.wait()
        known.write_text(f"service = {NEW}\n")
        tokens.refresh()
        await eventually(lambda: not registrar.known.is_set())
        assert "the token is wrong" in (registrar.trouble or "")
        mine.write_text(f"{NEW}\n")
        await registrar.known.wait()


# ---- a whole process


LIGHTHOUSE = ("lighthouse", "--bind", "127.0.0.1:0", "--log-format", "json")


async def logged(started: asyncio.subprocess.Process, text: str, times: int = 1) -> None:
    """Waits for lines of its log with ``text``."""
    assert started.stderr is not None
    async with asyncio.timeout(DEADLINE):
        while times:
            line = (await started.stderr.readline()).decode()
            assert line, "it ended"
            times -= text in line


async def url_of(started: asyncio.subprocess.Process) -> str:
    assert started.stdout is not None
    async with asyncio.timeout(DEADLINE):
        return (await started.stdout.readline()).decode().split()[1]


async def test_sighup_has_a_lighthouse_read_its_files_again_and_sigterm_still_ends_it(tmp_path: Path) -> None:
    authority, tokens = Authority(tmp_path), tmp_path / "tokens"
    tokens.write_text(f"admin = {OLD}\n")
    files = authority.service()
    assert files.cert is not None
    flags = ("--token-file", str(tokens))
    async with process(*LIGHTHOUSE, *flags, KEEPSTEP_LIGHTHOUSE_TLS_CERT=str(files.cert)) as started:
        url = f"{await url_of(started)}/v1/jobs"
        assert await status(url, OLD, authority.trusted()) == 200
        tokens.write_text(f"admin = {NEW}\n")
        authority.certificate("127.0.0.1").replace(files.cert)
        started.send_signal(signal.SIGHUP)
        await logged(started, "read again", times=2)
        assert await status(url, OLD, authority.trusted()) == 401
        assert await status(url, NEW, authority.trusted()) == 200
        started.terminate()
        async with asyncio.timeout(DEADLINE):
            assert await started.wait() == 0


async def test_files_are_read_again_without_a_signal_too(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin = {OLD}\n")
    async with process(*LIGHTHOUSE, "--token-file", str(tokens)) as started:
        url = f"{await url_of(started)}/v1/jobs"
        (tmp_path / "next").write_text(f"admin = {NEW}\n")
        (tmp_path / "next").replace(tokens)
        await logged(started, "read again")
        assert await status(url, NEW) == 200


async def test_sighup_ends_a_lighthouse_that_has_no_files() -> None:
    async with process(*LIGHTHOUSE) as started:
        await url_of(started)
        started.send_signal(signal.SIGHUP)
        async with asyncio.timeout(DEADLINE):
            assert await started.wait() == -signal.SIGHUP
