"""The page in a real browser, before a service that says what the test wants it to."""

from __future__ import annotations

import json
import time

import pytest

from keepstep_mesh.security.tokens import Tokens
from tests.browser.devtools import CHROMIUM
from tests.browser.told import HEADLINE, JOB, LIVE, SHOWN, TOAST, ToldMesh, row, shown

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)")

WORKER, ADMIN = "w" * 20, "a" * 20


async def test_a_page_needs_nothing_but_the_service_and_complains_of_nothing(tmp_path):
    async with shown(tmp_path, ToldMesh(4)) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        assert await page.run("location.hash") == f"#/job/{JOB}"
        await page.run("location.hash = '#/cluster'")
        await page.until("document.body.innerText.includes('http://10.0.0.1:29510')")
        await page.until(LIVE)
        assert {url[: len(endpoint.url) + 1] for url in page.requests} == {f"{endpoint.url}/"}
        assert page.complaints == []
        policy = await page.run("fetch('static/app.js').then((one) => one.headers.get('Content-Security-Policy'))")
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "unsafe" not in policy


async def test_a_state_that_changes_is_shown_as_it_happens(tmp_path):
    mesh = ToldMesh(4)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        mesh.turn("trainer-2", "lost")
        mesh.happened("lost", "trainer-2", "trainer-2 is lost: its connection ended")
        await page.until(f"{row('trainer-2')}.includes('lost')")
        await page.until("document.querySelector('.headline').textContent.includes('trainer-2 is lost')")
        await page.until("document.querySelector('.events').textContent.includes('its connection ended')")
        mesh.heals["trainer-2"] = {
            "bytes_done": 1 << 20, "bytes_total": 4 << 20, "bytes_per_second": 1e6, "seconds_left": 3.1,
            "via": "relay-1", "source": "trainer-0",
        }  # fmt: skip
        mesh.turn("trainer-2", "healing")
        await page.until("document.querySelector('progress').value === 0.25")
        heals = await page.run("document.querySelector('.heals').textContent")
        assert "trainer-2 is healing from trainer-0, relay-1" in heals
        assert "1.0 MiB of 4.0 MiB (25.0 %)" in heals
        mesh.heals.clear()
        mesh.turn("trainer-2", "training")
        await page.until("document.querySelector('.headline').textContent.includes('all training')")
        assert await page.run("document.querySelector('progress')") is None


async def test_members_of_a_model_that_exists_once_are_shown_with_their_keepers_exposure_and_copies(tmp_path):
    mesh = ToldMesh(3)
    mesh.turn("trainer-2", "standby")
    title = "document.querySelector('.now h2').textContent"
    heads = "[...document.querySelectorAll('.groups th.copies')].filter((one) => one.checkVisibility())"
    heads += ".map((one) => one.textContent).join()"
    cells = "[...document.querySelectorAll('.groups tbody tr')]"
    cells += ".map((one) => [...one.querySelectorAll('.copies')].map((cell) => cell.textContent))"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        assert [await page.run(title), await page.run(heads)] == [f"Job {JOB}", ""]
        mesh.copies["trainer-0"] = {"keepers": ["trainer-1"], "exposed": "", "bytes": 3 << 20}
        why = "its keeper trainer-0 has no copies: no memory"
        mesh.copies["trainer-1"] = {"keepers": ["trainer-0"], "exposed": why, "bytes": 1 << 20}
        mesh.tell_now()
        await page.until(f"{title} === 'Job {JOB}, one copy'")
        assert await page.run(heads) == "keepers,keeps"
        assert await page.run(cells) == [
            ["trainer-1", "3.0 MiB"], [f"trainer-0; exposed: {why}", "1.0 MiB"], ["", ""]
        ]  # fmt: skip
        phone = await browser.open(endpoint.url, width=360, height=740)
        await phone.until(f"{SHOWN} && {title} === 'Job {JOB}, one copy'")
        assert await phone.run("document.documentElement.scrollWidth") <= 360
        mesh.copies.clear()
        mesh.tell_now()
        await page.until(f"{title} === 'Job {JOB}' && {heads} === ''")
        assert page.complaints + phone.complaints == []


async def test_texts_of_the_service_are_shown_as_text_and_never_as_html(tmp_path):
    mesh, now = ToldMesh(2), time.time()
    evil = "<img src=x onerror='document.title=1'><b>bold</b>"
    mesh.happened(evil, "trainer-0", evil)
    mesh.waiting_for = mesh.value = mesh.store = evil
    mesh.names.append(evil)
    mesh.spans[evil] = [[mesh.t0, None, "training"]]
    mesh.copies[evil] = {"keepers": [evil], "exposed": evil, "bytes": 1}
    mesh.heals[evil] = {"bytes_done": 1, "bytes_total": 4, "bytes_per_second": 1e6, "seconds_left": 3.1, "via": evil,
                        "source": evil}  # fmt: skip
    mesh.transfers.append({**mesh.heals[evil], "kind": evil, "name": evil, "step": 1, "began": now, "ended": now,
                           "error": evil})  # fmt: skip
    mesh.failures.append({"t": now, "name": evil, "cause": evil, "recovered_at": None, "seconds_to_commit": None,
                          "seconds_to_return": None})  # fmt: skip
    mesh.hangs.append(evil)
    mesh.ends.append({"t": now, "name": evil, "host": evil, "verdict": evil, "reason": evil})
    texts = "['.waiting', '.hangs',"
    texts += "'[aria-label=\"Why groups ended\"]',"
    texts += " '.events', '.heals', '.charts', '.members', '.told', '[aria-label=Groups]',"
    texts += "'[aria-label=Failures]', '[aria-label=Stragglers]', '[aria-label^=Finished]']"
    lacking = f"{texts}.filter((it) => !document.querySelector(it).textContent.includes({json.dumps(evil)})).length"
    dangerous = "document.title === '1' || document.querySelectorAll('img, b b').length"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        await page.run("document.querySelector('.timeline').focus()")
        await page.press("ArrowDown")
        await page.until(f"{lacking} === 0")
        assert not await page.run(dangerous)
        await page.click(f"[aria-label={json.dumps(f'drain {evil}')}]")
        await page.until(f"document.querySelector('#order-title').textContent.includes({json.dumps(evil)})")
        await page.click("#order-yes")
        await page.until(f"{TOAST}?.includes({json.dumps(evil)})")
        await page.run("location.hash = '#/cluster'")
        await page.until(f"document.querySelector('h3 + p').textContent.startsWith({json.dumps(evil)})")
        assert not await page.run(dangerous)
        assert page.complaints == []
        await page.run(f"location.hash = '#/job/' + encodeURIComponent({json.dumps(evil)})")
        await page.until(f"document.querySelector('.now h2').textContent === {json.dumps(f'Job {evil}, one copy')}")
        assert not await page.run(dangerous)


async def test_the_verdicts_on_groups_that_ended_and_the_rank_that_holds_up_the_job_are_shown(tmp_path):
    mesh, now = ToldMesh(2), time.time()
    cells = "[...document.querySelectorAll('[aria-label=\"Why groups ended\"] tbody tr')]"
    cells += ".map((row) => [...row.children].slice(1).map((cell) => cell.textContent))"
    hangs = "document.querySelector('.hangs').textContent"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        assert await page.run(hangs) == ""
        mesh.ends = [
            {"t": now, "name": "trainer-1", "host": "h1", "verdict": "out of memory", "reason": "rank 0 was killed"},
            {"t": now - 9, "name": "trainer-0", "host": "h0", "verdict": "script", "reason": "ValueError: bad"},
        ]
        mesh.hangs = ["trainer-0:0123 rank 2 waits in train.py:88 next(batches) for 74 s"]
        mesh.tell_now()
        await page.until(f"{hangs}.includes('rank 2 waits in train.py:88 next(batches) for 74 s')")
        await page.until(f"{cells}.length === 2")
        assert await page.run(cells) == [
            ["trainer-1", "h1", "out of memory", "rank 0 was killed"],
            ["trainer-0", "h0", "script", "ValueError: bad"],
        ]
        assert page.complaints == []


async def test_an_admin_gives_an_order_once_it_is_confirmed(tmp_path):
    mesh = ToldMesh(2)
    async with shown(tmp_path, mesh, Tokens(worker=WORKER, admin=ADMIN)) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until("document.querySelector('#token').open")
        await page.run("document.querySelector('#token-value').focus()")
        for letter in ADMIN:
            await page.press(letter)
        await page.press("Enter")
        await page.until(SHOWN)
        await page.click("[aria-label='evict trainer-1']")
        await page.until("document.querySelector('#order').open")
        await page.press("Escape")
        await page.until("!document.querySelector('#order').open")
        await page.click("[aria-label='drain trainer-1']")
        await page.until("document.querySelector('#order').open")
        await page.run("document.querySelector('#order-reason').value = 'its node is needed'")
        await page.click("#order-yes")
        await page.until("document.querySelector('.toast')?.textContent === 'trainer-1: drain is done'")
        assert mesh.orders == [("drain", "trainer-1", {"reason": "its node is needed"})]
        assert all("401" in one for one in page.complaints)


async def test_a_worker_may_look_and_is_offered_no_orders(tmp_path):
    async with shown(tmp_path, ToldMesh(2), Tokens(worker=WORKER, admin=ADMIN)) as (browser, endpoint):
        page = await browser.open(endpoint.url, token=WORKER)
        await page.until(SHOWN)
        offered = (
            "[...document.querySelectorAll('.groups .orders button')].filter((one) => one.checkVisibility()).length"
        )
        assert await page.run(offered) == 0
        admin = await browser.open(endpoint.url, token=ADMIN)
        await admin.until(f"{SHOWN} && {offered} === 4")
        assert page.complaints + admin.complaints == []


async def test_the_time_line_is_zoomed_by_mouse_and_by_keys(tmp_path):
    pressed = "[...document.querySelectorAll('.ranges [aria-pressed=true]')].map((one) => one.textContent).join()"
    async with shown(tmp_path, ToldMesh(3)) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(f"{SHOWN} && {pressed} === '15 min'")
        left, top, width = await page.run(
            "(({left, top, width}) => [left, top, width])(document.querySelector('.timeline').getBoundingClientRect())"
        )
        await page.drag(left + 0.5 * width, top + 60, left + 0.75 * width)
        await page.until(f"{pressed} === ''")
        asked = "performance.getEntriesByType('resource').map((one) => new URL(one.name))"
        asked += ".findLast((one) => one.pathname.endsWith('/timeline') && one.searchParams.has('until'))"
        query = await page.until(f"{asked} && [...{asked}.searchParams]")
        since, until = (float(dict(query)[name]) for name in ("since", "until"))
        assert 150 < until - since < 350
        await page.run("document.querySelector('.timeline').focus()")
        await page.press("+")
        half = (until - since) / 2
        await page.until(
            f"Math.abs({asked}.searchParams.get('until') - {asked}.searchParams.get('since') - {half}) < 1"
        )
        await page.press("ArrowDown")
        await page.until("document.querySelector('.told').textContent.startsWith('trainer-2: training from')")
        await page.press("Enter")
        await page.until("document.querySelector('.charts').textContent.includes('trainer-2')")
        await page.press("0")
        await page.until(f"{pressed} === '15 min'")
        assert page.complaints == []


async def test_the_theme_follows_the_system_until_it_is_switched(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        page = await browser.open(endpoint.url, dark=True)
        await page.until(SHOWN)
        background = "getComputedStyle(document.body).backgroundColor"
        dark = await page.run(background)
        assert await page.run("document.documentElement.dataset.theme") == "dark"
        await page.click("#theme")
        assert await page.run(background) != dark
        assert await page.run("document.querySelector('#theme').textContent") == "Theme: light"
        await page.tell("Page.reload")
        await page.until(f"{SHOWN} && document.documentElement.dataset.theme === 'light'")


@pytest.mark.parametrize(("width", "height"), [(360, 740), (768, 1024), (3840, 2160)])
async def test_nothing_is_cut_off_on_a_phone_a_tablet_or_a_wall(tmp_path, width, height):
    mesh = ToldMesh(40)
    mesh.turn("trainer-3", "lost")
    mesh.happened("quorum", "", f"quorum 12: {', '.join(mesh.names)}")
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url, width=width, height=height)
        await page.until(SHOWN)
        outside = (
            "one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('.scroll') && one.checkVisibility()"
        )
        over = f"[...document.querySelectorAll('body *')].filter((one) => {outside})"
        assert await page.run(f"{over}.map((one) => one.className || one.tagName)") == []
        assert await page.run("document.documentElement.scrollWidth") <= width


async def test_1000_groups_are_shown_by_those_in_trouble_first(tmp_path, record_property):
    """The largest job that the page is made for; it may take some seconds to load while other tests run."""
    mesh = ToldMesh(1000)
    rows = "document.querySelectorAll('.groups tbody tr').length"
    first = "[...document.querySelectorAll('.groups tbody th')].slice(0, 2).map((one) => one.textContent).join()"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        began = time.perf_counter()
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        record_property("load_seconds", time.perf_counter() - began)
        assert await page.run(rows) == 100
        mesh.copies["trainer-600"] = {"keepers": [], "exposed": "no other member", "bytes": 0}
        mesh.tell_now()
        await page.until(f"{first} === 'trainer-5 straggler,trainer-600 straggler'")
        mesh.copies.clear()
        mesh.turn("trainer-700", "lost")
        await page.until(
            f"{HEADLINE}.includes('trainer-700 is lost') && {first} === 'trainer-5 straggler,trainer-700 straggler'"
        )
        await page.run(
            "[...document.querySelectorAll('.groups button')].find((b) => /more/.test(b.textContent)).click()"
        )
        assert await page.run(rows) == 200
        await page.click(".groups .chips .lost")
        await page.until(f"{rows} === 1")
        await page.click(".groups .chips .lost")
        calls = await page.calls_until(
            lambda: mesh.turn("trainer-700", "training"), f"{HEADLINE}.includes('all training')"
        )
        assert calls < len(mesh.names) ** 2 / 2, "an update compares groups with each other"
        assert page.complaints == []
