"""Check this machine before its group joins. The built-in checks take at most ``BUILTIN_SECONDS``."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

import aiohttp
import torch

from keepstep.preflight.product import comparable_product, own_device, wrong_bytes
from keepstep.runtime.exits import PreflightExit
from keepstep.runtime.host_memory import available_bytes
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS, LoopThread
from keepstep.session.session_settings import SessionSettings
from keepstep_mesh.checks import findings
from keepstep_mesh.checks.findings import Finding, Verdict
from keepstep_mesh.checks.gpu_counters import examine_gpus
from keepstep_mesh.checks.preflight_settings import PreflightSettings
from keepstep_mesh.checks.service_answers import fastest_answer, request_rate
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.http import Identity
from keepstep_mesh.security.request_errors import explained
from keepstep_mesh.threads.starting import Thread

log = get_logger("keepstep.preflight")

BUILTIN_SECONDS = 5.0
"""Limit of the built-in checks. Most of it is for the network: the others take milliseconds, unless CUDA starts."""
NETWORK_SECONDS = 3.0
OWN_CHECK_SECONDS = 60.0
"""Limit of each own command, and of each HTTP endpoint."""
KILLED_SECONDS = 5.0
"""Limit of the wait for the end of an own command that was killed."""
DISK_SECONDS = 1.0
LEAST_TEMPORARY = 64 << 20
"""Bytes that must be free in the folder for temporary files, unless the settings name it."""
FAILURES = (aiohttp.ClientError, TimeoutError, OSError, ValueError)


def check_machine(settings: PreflightSettings, session: SessionSettings, name: str, loop_thread: LoopThread) -> str:
    """Check this machine, and return its product for ``MemberInfo.product``.

    The first rank of each machine (``LOCAL_RANK`` 0) checks what its ranks share.

    Args:
        settings: limits, and own checks.
        session: how to reach the lighthouse.
        name: of this group, which is left out as a neighbour; empty: unknown.
        loop_thread: for requests.

    Raises:
        PreflightExit: a check failed.
    """
    began = time.monotonic()
    device = own_device()
    found = [findings.of_product(wrong_bytes(device), str(device))]
    product = comparable_product(device)
    if not product:
        found.append(
            Finding("comparison with other groups", Verdict.WARN, "not compared: its bits vary from run to run")
        )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        found += [findings.of_memory(available_bytes(), settings.least_memory), *_of_disks(settings)]
        found += examine_gpus(_visible_gpus())
        limit = max(0.5, min(NETWORK_SECONDS, BUILTIN_SECONDS - (time.monotonic() - began)))
        found += loop_thread.call(_of_mesh(settings, session, name, limit), limit + CALL_MARGIN_SECONDS)
        seconds = time.monotonic() - began
        found += [_of_command(one) for one in settings.commands]
        if settings.urls:
            limit = OWN_CHECK_SECONDS + CALL_MARGIN_SECONDS
            found += loop_thread.call(_of_urls(settings.urls), limit)
    else:
        seconds = time.monotonic() - began
    for one in found:
        tell = log.info if one.verdict is Verdict.OK else log.warning
        tell("check before joining", check=one.check, verdict=one.verdict.value, found=one.found)
    if failed := findings.sentence(found):
        raise PreflightExit(f"host {session.about.host}: {failed}")
    log.info(
        "this machine passed its checks", host=session.about.host, checks=len(found), builtin_seconds=round(seconds, 2)
    )
    return product


def _visible_gpus() -> tuple[str, ...] | None:
    if not torch.cuda.is_available():
        return None
    return tuple(str(torch.cuda.get_device_properties(one).uuid) for one in range(torch.cuda.device_count()))


def _of_disks(settings: PreflightSettings) -> Iterator[Finding]:
    least: Mapping[str, int] = dict(settings.least_disk)
    try:
        least = {tempfile.gettempdir(): LEAST_TEMPORARY, **least}
    except OSError as error:  # none of them can be written: their disks are full, or they are not there
        yield findings.of_disk("for temporary files", None, LEAST_TEMPORARY, str(error))
    for folder, size in least.items():
        # in a process of its own: a call that waits for a dead file system cannot be interrupted
        asked = subprocess.Popen(  # noqa: S603
            [shutil.which("stat") or "/usr/bin/stat", "-f", "-c", "%a %S", "--", folder],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )
        try:
            said, problem = asked.communicate(timeout=DISK_SECONDS)
        except subprocess.TimeoutExpired:
            asked.kill()
            _reap_later(asked)
            yield findings.of_disk(folder, None, size, f"the file system does not answer within {DISK_SECONDS:g} s")
            continue
        if asked.returncode or not os.access(folder, os.W_OK):
            yield findings.of_disk(folder, None, size, problem.strip() or "it may not be written")
            continue
        blocks, block_bytes = map(int, said.split())
        yield findings.of_disk(folder, blocks * block_bytes, size)


async def _of_mesh(settings: PreflightSettings, session: SessionSettings, name: str, limit: float) -> list[Finding]:
    """Check clock and bandwidth against the first lighthouse that answers, and the bandwidth to another group.

    A lighthouse that does not answer does not count against this machine: the session waits for it.
    """
    least = settings.least_bandwidth
    problem = "no lighthouse answered"
    found: list[Finding] = []
    deadline = asyncio.get_running_loop().time() + limit
    try:
        async with (
            asyncio.timeout_at(deadline),
            Identity(session.token, session.tls).session(timeout=limit) as http,
            Identity(None, session.tls).session(timeout=limit) as to_groups,
        ):
            while not found:
                for address in session.addresses:
                    try:
                        answer = await fastest_answer(http, address)
                    except FAILURES as error:
                        problem = explained(error, address)
                        continue
                    if answer.clock_offset is not None:
                        found.append(findings.of_clock(address, answer.clock_offset, answer.round_trip))
                    found.append(findings.of_rate(address, await request_rate(http, address), least))
                    found.append(
                        await _of_neighbour(http, to_groups, f"{address}/v1/jobs/{session.job}/replicas", name, least)
                    )
                    break
                else:
                    await asyncio.sleep(0.1)
    except FAILURES as error:
        problem = str(error) or problem
    return found or [Finding("lighthouse", Verdict.WARN, f"clock and bandwidth not checked: {problem}")]


async def _of_neighbour(
    http: aiohttp.ClientSession, to_groups: aiohttp.ClientSession, url: str, name: str, least: int
) -> Finding:
    async with http.get(url) as answer:
        if answer.status not in (HTTPStatus.OK, HTTPStatus.NOT_FOUND):  # not found: this group is the first of its job
            problem = f"the lighthouse does not list the groups for this token (status {answer.status})"
            return findings.of_rate("another group", None, least, problem)
        body: Any = await answer.json() if answer.status == HTTPStatus.OK else {}
    try:
        others = [
            (str(one["name"]), str(one["address"]))
            for one in body.get("replicas", ())
            if one["address"] and one["state"] != "gone" and one["name"] != name
        ]
    except (AttributeError, KeyError, TypeError):
        return findings.of_rate("another group", None, least, "the list of the groups has another form")
    if not others:
        return findings.of_rate("another group", None, least, "no other group is there")
    other, address = others[0]
    try:
        return findings.of_rate(f"group {other}", await request_rate(to_groups, address), least)
    except FAILURES as error:
        return findings.of_rate(f"group {other}", None, least, explained(error, address))


def _of_command(command: str) -> Finding:
    with tempfile.TemporaryFile() as output:  # no pipe, which a child of the command might keep open
        process = subprocess.Popen(  # noqa: S603 - the check is the user's
            ["/bin/sh", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(OWN_CHECK_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(KILLED_SECONDS)
            except subprocess.TimeoutExpired:  # it waits for a dead file system or device
                _reap_later(process)
        output.seek(max(0, output.seek(0, os.SEEK_END) - 4096))
        lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    return findings.of_command(command, code, lines[-1] if lines else "", OWN_CHECK_SECONDS)


def _reap_later(killed: subprocess.Popen[Any]) -> None:
    """Take the exit code of a process whenever it ends, so that it does not stay as a zombie."""
    Thread(target=killed.communicate, name="keepstep-preflight", daemon=True).start()


async def _of_urls(urls: tuple[str, ...]) -> list[Finding]:
    async def asked(http: aiohttp.ClientSession, url: str) -> Finding:
        try:
            async with http.get(url, allow_redirects=False) as answer:
                said = (await answer.content.read(4096)).decode(errors="replace")
                return findings.of_endpoint(url, answer.status, said)
        except FAILURES as error:
            return findings.of_endpoint(url, None, explained(error, url))

    async with Identity().session(timeout=OWN_CHECK_SECONDS) as http:
        return list(await asyncio.gather(*(asked(http, one) for one in urls)))
