"""A machine that fails a check is refused by name, with what was found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from aiohttp import ClientSession, web

from keepstep.preflight import preflight
from keepstep.preflight.preflight import check_machine
from keepstep.runtime.exits import PreflightExit
from keepstep.runtime.loop_thread import LoopThread
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.checks.findings import Verdict
from keepstep_mesh.checks.preflight_settings import PreflightSettings
from keepstep_mesh.exit_codes import EXIT_PREFLIGHT
from tests.support.services.lighthouse_driver import lighthouse

NOWHERE = ("http://127.0.0.1:1",)


@pytest.fixture
def loop_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    monkeypatch.setattr(preflight, "NETWORK_SECONDS", 0.5)  # of a lighthouse that is never there
    thread = LoopThread()
    yield thread
    thread.stop()


def checked(thread: LoopThread, *checks: str, addresses: tuple[str, ...] = NOWHERE) -> str:
    settings = PreflightSettings.parsed(("builtin", *checks))
    assert settings is not None
    session = SessionSettings.from_environment(addresses, "r0:1", connect_timeout=1.0)
    return check_machine(settings, session, "r0", thread)


def refusal(thread: LoopThread, *checks: str) -> str:
    with pytest.raises(PreflightExit) as refused:
        checked(thread, *checks)
    assert refused.value.code == EXIT_PREFLIGHT
    assert str(refused.value).startswith(f"host {socket.gethostname()}: ")
    return str(refused.value)


def test_a_sound_machine_passes_while_the_lighthouse_is_not_there_yet(loop_thread: LoopThread) -> None:
    assert checked(loop_thread, "command=true", "disk=/tmp:1")


async def test_a_sound_machine_passes_beside_a_lighthouse(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "NETWORK_SECONDS", 60.0)
    monkeypatch.setattr(preflight, "BUILTIN_SECONDS", 60.0)  # for a busy machine
    async with lighthouse() as service:
        assert await asyncio.to_thread(checked, loop_thread, addresses=(service.address,))
        with pytest.raises(PreflightExit, match=r"bandwidth to http://127.0.0.1:[0-9]+: .* \(at least 1024.0 GiB/s\)"):
            await asyncio.to_thread(checked, loop_thread, "bandwidth=1T", addresses=(service.address,))


def test_each_limit_and_own_command_can_refuse(loop_thread: LoopThread, tmp_path: Path) -> None:
    assert "memory: " in refusal(loop_thread, "memory=1000T")
    assert f"disk {tmp_path}: " in refusal(loop_thread, f"disk={tmp_path}:1000T")
    assert "disk /nowhere: " in refusal(loop_thread, "disk=/nowhere:1")
    both = refusal(loop_thread, "command=echo the fan is off; exit 3", "command=false", "command=true")
    assert "command echo the fan is off; exit 3: exit code 3: the fan is off" in both
    assert "command false: exit code 1" in both
    assert "command true" not in both


def test_an_endpoint_that_answers_503_refuses_and_gets_no_token(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEEPSTEP_TOKEN", "a-secret-of-the-mesh-for-tests")
    headers: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        headers.append(request.headers.get("Authorization"))
        return web.Response(status=503 if request.path == "/bad" else 200, text="node is drained")

    async def serve() -> tuple[web.AppRunner, str]:
        app = web.Application()
        app.router.add_get("/{path}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    runner, url = loop_thread.call(serve(), 10.0)
    try:
        assert f"{url}/bad: status 503: node is drained" in refusal(loop_thread, f"{url}/bad", f"{url}/good")
    finally:
        loop_thread.call(runner.cleanup(), 10.0)
    assert headers == [None, None]
    assert f"{url}/good: no answer" in refusal(loop_thread, f"{url}/good")


@pytest.mark.parametrize(
    ("status", "body", "text"),
    [
        (403, {}, "the lighthouse does not list the groups for this token (status 403)"),
        (404, {}, "no other group is there"),
        (200, {"replicas": [{"name": "r0", "address": "http://a", "state": "working"}]}, "no other group is there"),
        (200, {"replicas": 3}, "the list of the groups has another form"),
        (200, ["r1"], "the list of the groups has another form"),
        (200, {"replicas": [{"name": "r1"}]}, "the list of the groups has another form"),
        (200, {"replicas": [{"name": "r1", "address": "no address", "state": "working"}]}, "not measured: "),
    ],
)
async def test_the_bandwidth_to_another_group_is_measured_or_the_reason_is_told(
    status: int, body: object, text: str
) -> None:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/replicas", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with ClientSession() as http:
            found = await preflight._of_neighbour(http, http, f"{site.name}/replicas", "r0", 1)
    finally:
        await runner.cleanup()
    assert found.verdict is Verdict.WARN
    assert text in found.found


def test_a_machine_without_a_folder_for_temporary_files_is_refused(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", missing)
    assert "disk for temporary files: [Errno 2] No usable temporary directory" in refusal(loop_thread)


def test_a_file_system_that_does_not_answer_refuses_and_leaves_no_zombie(
    loop_thread: LoopThread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stat, before = tmp_path / "stat", set(psutil.Process().children())
    stat.write_text("#!/bin/sh\nexec sleep 1000\n")
    stat.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert "does not answer within" in refusal(loop_thread, f"disk={tmp_path}:1")
    until = time.monotonic() + 60.0
    while left := set(psutil.Process().children()) - before:
        assert time.monotonic() < until, left
        time.sleep(0.01)  # nothing tells when a thread has reaped it


TRACED = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None)
libc.prctl(0x59616D61, ctypes.c_ulong(2**64 - 1), 0, 0, 0)  # PR_SET_PTRACER: any process
if os.fork() == 0:
    os.setsid()
    seized = libc.ptrace(0x4206, os.getppid(), None, None)  # PTRACE_SEIZE: its death is the tracer's to notice
    with open(sys.argv[1] + ".new", "w") as file:
        file.write(f"{os.getpid()} {os.getppid()} {seized}")
    os.rename(sys.argv[1] + ".new", sys.argv[1])
signal.pause()
"""


def test_an_own_command_that_cannot_be_killed_does_not_hold_up_the_check(
    loop_thread: LoopThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, told = tmp_path / "traced.py", tmp_path / "tracer"
    script.write_text(TRACED)
    monkeypatch.setattr(preflight, "OWN_CHECK_SECONDS", 5.0)
    monkeypatch.setattr(preflight, "KILLED_SECONDS", 0.1)
    try:
        assert "did not end within 5 s" in refusal(loop_thread, f"command=exec {sys.executable} {script} {told}")
    finally:
        if told.exists():
            tracer, command, refused = map(int, told.read_text().split())
            os.kill(tracer, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # already waited for
                os.waitpid(command, 0)
            assert not refused, "this machine does not let a process trace its parent"
