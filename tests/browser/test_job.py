"""The page beside a real job: real groups, a real lighthouse and a real metrics service, in a real browser."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from metrics_driver import client, metrics_process
from tests.browser.devtools import CHROMIUM, Page, chromium
from tests.training.job import Job, free_port

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"),
    pytest.mark.training,
    pytest.mark.timeout(300),
]

HEADLINE = "document.querySelector('.headline').textContent"
PICTURES = os.environ.get("KEEPSTEP_TEST_PICTURES")
"""A folder to put screenshots into, for people."""


@asynccontextmanager
async def shown(folder: Path, url: str) -> AsyncIterator[Page]:
    async with chromium(folder) as browser:
        page = await browser.open(f"{url}/#/job/default", width=1400, height=1000)
        await page.until("document.querySelector('#live').dataset.live === 'yes'")
        yield page


def row(name: str) -> str:
    """A JavaScript expression: the text of a group's row."""
    return f"[...document.querySelectorAll('tr')].find((one) => one.textContent.startsWith('{name}')).textContent"


async def picture(page: Page, name: str) -> None:
    if PICTURES:
        await page.screenshot(Path(PICTURES) / f"{name}.png")


async def test_a_kill_and_the_recovery_are_shown_as_they_happen(tmp_path):
    async with Job() as job, metrics_process("--lighthouse", job.address) as (_, url):
        a, b = await job.start("a"), await job.start("b")
        await job.advance(a, b)
        async with shown(tmp_path, url) as page:
            await page.until(f"{row('a')}.includes('training') && {row('b')}.includes('training')")
            b.kill(number=signal.SIGKILL)
            await page.until(f"{row('b')}.includes('lost')")
            await page.until(f"{HEADLINE}.includes('b is lost')")
            await page.until("document.querySelector('.events').textContent.includes('b is lost: ')")
            await job.advance(a)
            await picture(page, "kill")
            await job.start("b")
            await job.advance(a, b)
            await page.until(f"{HEADLINE} === '2 of 2 groups in the quorum, all training.'")
            await page.until("document.querySelector('.events').textContent.includes('b has healed')")
            shares = "document.querySelector('.shares').textContent"
            await page.until(f"{shares}.includes('lost') && {shares}.includes('training')")
            await page.until("document.querySelector('.charts').textContent.includes('loss')")
            await picture(page, "recovered")
            assert page.complaints == []
            assert {one.removeprefix(url)[:1] for one in page.requests} == {"/"}
        assert job.assert_identical() > 0


async def test_the_page_says_that_it_is_not_live_and_comes_back_after_a_restart(tmp_path):
    port = free_port()
    flags = ("--bind", f"127.0.0.1:{port}", "--data-dir", str(tmp_path / "metrics"))
    async with Job() as job, metrics_process("--lighthouse", job.address, *flags) as (first, url):
        a = await job.start("a")
        await job.advance(a)
        async with client(url) as asking:
            await asking.until("now", lambda now: now["step"] > 0, "default")
        (tmp_path / "chromium").mkdir()
        async with shown(tmp_path / "chromium", url) as page:
            await page.until(f"{row('a')}.includes('training')")
            first.send_signal(signal.SIGKILL)
            await first.wait()
            said = await page.until("document.querySelector('#live').textContent.startsWith('not live since') && 1")
            assert said
            asked = len(page.requests)
            async with metrics_process("--lighthouse", job.address, *flags):
                await page.until("document.querySelector('#live').dataset.live === 'yes'")
                await job.advance(a)
                step = int(await page.run("document.querySelector('.facts dd').textContent"))
                await page.until(f"Number(document.querySelector('.facts dd').textContent) > {step}")
                await page.until("document.querySelector('#problem').hidden")
            assert len(page.requests) > asked
            assert all(one.startswith("network: ") for one in page.complaints), page.complaints
