"""The page beside a real job: real groups, a real lighthouse and a real metrics service, in a real browser."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.browser.devtools import CHROMIUM, Page, chromium
from tests.browser.told import HEADLINE, LIVE, TOAST, row
from tests.support.jobs.job import Job
from tests.support.network.ports import free_port
from tests.support.services.metrics_driver import client, metrics_process

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)"),
    pytest.mark.training,
    pytest.mark.timeout(300),
]

WORKER, ADMIN = "w" * 20, "a" * 20
PICTURES = os.environ.get("KEEPSTEP_TEST_PICTURES")
"""A folder to put screenshots into, for people."""


@asynccontextmanager
async def shown(folder: Path, url: str, token: str = "") -> AsyncIterator[Page]:
    async with chromium(folder) as browser:
        page = await browser.open(f"{url}/#/job/default", width=1400, height=1000, token=token)
        await page.until(LIVE)
        yield page


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
            await page.until("document.querySelector('.events').textContent.includes('b was lost: ')")
            await job.advance(a)
            await picture(page, "kill")
            await job.start("b")
            await job.advance(a, b)
            await page.until(f"{HEADLINE} === '2 of 2 groups in the quorum, all training.'")
            await page.until("document.querySelector('.events').textContent.includes('b healed')")
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
                await page.until(LIVE)
                await job.advance(a)
                step = int(await page.run("document.querySelector('.facts dd').textContent"))
                await page.until(f"Number(document.querySelector('.facts dd').textContent) > {step}")
                await page.until("document.querySelector('#problem').hidden")
            assert len(page.requests) > asked
            assert all(one.startswith("network: ") for one in page.complaints), page.complaints


async def test_an_admin_drains_and_evicts_real_groups_and_a_worker_may_not(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"worker = {WORKER}\nadmin alice = {ADMIN}\n")
    secured = ("--token-file", str(tokens))
    offered = "[...document.querySelectorAll('.groups .orders button')].filter((one) => one.checkVisibility()).length"
    events = "document.querySelector('.events').textContent"

    async def order(page: Page, action: str, name: str, reason: str) -> None:
        await page.click(f"[aria-label='{action} {name}']")
        await page.until("document.querySelector('#order').open && document.activeElement.id === 'order-reason'")
        await page.type(reason)
        await page.click("#order-yes")

    async with Job(*secured) as job, metrics_process("--lighthouse", job.address, *secured) as (_, url):
        a, b, c = [await job.start(name, KEEPSTEP_TOKEN=WORKER) for name in "abc"]
        await job.advance(a, b, c)
        (tmp_path / "chromium").mkdir()
        async with shown(tmp_path / "chromium", url, WORKER) as page:
            await page.until(f"{HEADLINE}.startsWith('3 of 3 groups')")
            assert await page.run(offered) == 0
            await order(page, "evict", "b", "mine")  # by a script: it is not to be seen
            await page.until(f"{TOAST} === 'Evict b: a worker token may not do this; it takes admin'")
            await job.advance(a, b, c)

            await page.click("#sign")
            await page.until("document.querySelector('#token').open")
            await page.type(ADMIN)
            await page.press("Enter")
            await page.until(f"{LIVE} && {offered} === 6")
            await order(page, "drain", "b", "its machine is needed")
            await page.until(f"{TOAST} === 'b is asked to finish its step and leave'")
            assert await b.exit_codes() == [0]
            await page.until(f"/admin alice at .* drained b: its machine is needed/.test({events})")
            await page.until(f"{HEADLINE}.startsWith('2 of 2 groups')")
            await page.run("window.late = document.querySelector('[aria-label=\"drain c\"]')")
            await order(page, "evict", "c", "bad GPU")
            await page.until(f"{TOAST} === 'c is evicted'")
            assert await c.exit_codes() == [77]
            await page.until(f"/admin alice at .* evicted c: bad GPU/.test({events})")
            await page.until(f"{HEADLINE} === '1 of 1 group in the quorum, all training.'")
            assert "c is kept out" in await page.run("document.querySelector('.groups').textContent")
            assert await page.run(offered) == 3, "drain and evict a, readmit c"
            await job.advance(a)
            await page.run("late.click()")  # as a click just before its row goes
            await page.click("#order-yes")
            await page.until(f"{TOAST} === 'Drain c: c has left already'")
            assert all("403" in one or "409" in one for one in page.complaints), page.complaints
