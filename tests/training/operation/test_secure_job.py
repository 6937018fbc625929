"""A job over mutual TLS, whose tokens and certificates are replaced while it trains."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.support.jobs.job import DEADLINE, Job
from tests.support.network.certificates import Authority

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

OLD, NEW = "old-" * 5, "new-" * 5


async def read_again(job: Job) -> None:
    """Has the lighthouse read its files, tokens first, and waits until it has."""
    assert job.lighthouse is not None
    os.kill(job.lighthouse.pid, signal.SIGHUP)
    log = job.directory / "lighthouse.log"
    async with asyncio.timeout(DEADLINE):
        while log.read_text().count("read again") < 2:  # noqa: ASYNC110 - nothing to wait on
            await asyncio.sleep(0.02)


async def test_new_tokens_and_certificates_cost_no_step_and_let_in_who_comes_back(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    service, mine = authority.service(mutual=True), authority.client("trainer")
    assert service.cert is not None
    assert mine.cert is not None
    tokens, token = tmp_path / "tokens", tmp_path / "token"
    tokens.write_text(f"worker = {OLD}\n")
    token.write_text(f"{OLD}\n")
    files = {"KEEPSTEP_TLS_CA": authority.pem, "KEEPSTEP_TLS_CERT": mine.cert, "KEEPSTEP_TOKEN_FILE": token}
    variables = {name: str(file) for name, file in files.items()}
    job = Job("--token-file", str(tokens), "--tls-cert", str(service.cert), "--tls-ca", str(authority.pem))
    job.address = f"https://127.0.0.1:{job.port}"
    async with job:
        a, b = [await job.start(name, **variables) for name in ("a", "b")]
        await job.advance(a, b)

        tokens.write_text(f"worker = {OLD}\nworker = {NEW}\n")
        authority.certificate("127.0.0.1").replace(service.cert)
        await read_again(job)
        token.write_text(f"{NEW}\n{OLD}\n")
        # A new group shows the new one, to the lighthouse and to the group that it heals from.
        b.kill()
        await job.advance(a)
        await job.start("b", **variables)
        await job.advance(a, b)

        token.write_text(f"{NEW}\n")
        tokens.write_text(f"worker = {NEW}\n")
        # A group that was there all the time comes back with it too.
        await job.stop_lighthouse()
        await job.start_lighthouse()
        await job.advance(a, b)
        job.assert_all_live()
        assert sum(event["event"] == "started" for event in a.lines) == 1
        assert job.assert_identical() > 10
