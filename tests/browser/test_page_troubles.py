"""The page under faults: a service that is slow, wrong, or new, a wrong clock, a long day."""

from __future__ import annotations

import json
import time
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.browser.devtools import CHROMIUM, Page, chromium
from tests.browser.told import HEADLINE, JOB, LIVE, PROBLEM, SHOWN, ToldMesh, shown
from tests.support.services.metrics_driver import Teller, client, metrics, step

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)")

HOUR = 3600
SILENCE_SECONDS = 25
"""After which the page itself takes a stream for dead."""


def streams(page: Page) -> int:
    """How many are open."""
    return sum("/v1/stream" in address for address in page.unanswered.values())


async def test_a_stream_that_cannot_be_read_is_not_left_open(tmp_path):
    mesh = ToldMesh(2)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        for _ in range(4):
            mesh.tell("now", {"t": float("nan")})
            await page.until("document.querySelector('#live').dataset.live === 'no'")
            await page.until(LIVE)
        mesh.turn("trainer-1", "lost")
        await page.until(f"{HEADLINE}.includes('trainer-1 is lost')")
        assert streams(page) == 1
        assert len(page.complaints) == 4, "each is on the console"
        broken = """((job) => import("/static/api.js").then(({ Api }) => new Promise((tried) => {
            const [stop, heard] = [new AbortController(), () => null.x];
            const live = (yes) => yes || tried(stop.abort());
            new Api().follow("v1/stream?job=" + job, { heard, live, signal: stop.signal });
        })))"""
        await page.run(f"{broken}({json.dumps(JOB)})")
        assert "TypeError: Cannot read properties of null" in page.complaints[-1], "the network has no part in it"


async def test_answers_that_are_no_json_are_told_as_such_and_end_with_the_trouble(tmp_path):
    mesh = ToldMesh(2)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        mesh.garbage = True
        mesh.cut()
        await page.until(f"({PROBLEM}).includes('is not JSON')")
        await page.until("document.querySelector('#live').textContent.includes('is not JSON')")
        assert await page.run("document.querySelector('#live').dataset.live") == "no"
        mesh.garbage = False
        await page.until(f"{LIVE} && ({PROBLEM}) === ''")
        assert page.complaints == []


async def test_a_service_that_is_too_slow_is_told_as_such(tmp_path):
    mesh = ToldMesh(2)
    faster = "const wait = AbortSignal.timeout; AbortSignal.timeout = (ms) => wait.call(AbortSignal, ms / 20)"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url, first=faster)
        await page.until(SHOWN)
        mesh.held.clear()
        mesh.happened("joined", "trainer-1", "trainer-1 joined")  # the page asks for the log at once
        await page.until(f"({PROBLEM}) === 'The metrics service did not answer within 20 s.'")
        assert await page.run("document.querySelectorAll('.shares li b').length"), "what was there stays"
        mesh.held.set()
        mesh.happened("joined", "trainer-1", "trainer-1 joined again")
        await page.until(f"({PROBLEM}) === ''")


async def test_an_answer_that_arrives_late_does_not_replace_newer_state_of_the_stream(tmp_path):
    mesh = ToldMesh(1)
    late = """const answered = fetch; window.fetch = async (path, options) => {
        const answer = await answered(path, options);
        if (String(path).includes('/now')) await new Promise((resolve) => window.letGo = resolve);
        return answer;
    }"""
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url, first=late)
        await page.until(f"window.letGo && {HEADLINE} === '1 of 1 group in the quorum, all training.'")
        mesh.leave("trainer-0")
        await page.until(f"{HEADLINE} === 'No group is running.'")
        await page.run("window.letGo()")
        await page.until("performance.getEntriesByType('resource').some((one) => one.name.includes('/timeline'))")
        assert await page.run(HEADLINE) == "No group is running."


async def test_the_jobs_are_shown_while_no_lighthouse_is_known(tmp_path):
    async with metrics() as real, client(real.address) as asking, chromium(tmp_path) as browser:
        await asking.tell(Teller("a:1"), step(time.time(), 1))
        page = await browser.open(f"{real.address}/#/cluster")
        await page.until(f"({PROBLEM}).includes('not registered with a lighthouse')")
        assert await page.run("document.querySelector('[aria-label=Jobs] tbody').textContent.startsWith('jobunknown')")


async def test_an_address_with_a_stray_percent_sign_shows_a_page(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        page = await browser.open(f"{endpoint.url}/#/job/50%")
        await page.until(f"{SHOWN} && document.querySelector('.now h2').textContent === 'Job 50%'")
        assert any(one.startswith(f"{endpoint.url}/v1/jobs/50%25/goodput") for one in page.requests)
        assert page.complaints == []


@pytest.mark.parametrize("hours", [5, -5])
async def test_the_clock_of_the_browser_does_not_matter(tmp_path, hours):
    wrong = f"const right = Date.now; Date.now = () => right() + {hours * HOUR * 1000}"
    mesh = ToldMesh(2)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url, first=wrong)
        await page.until(SHOWN)
        queries = [parse_qs(urlsplit(one).query) for one in page.requests if "/incidents" not in one]  # of a day
        since = [float(one["since"][0]) for one in queries if "since" in one]
        assert since
        assert all(800 < time.time() - one < 1000 for one in since), "15 minutes are shown"
        assert page.complaints == []


async def test_a_stream_that_died_while_the_machine_slept_is_opened_again_at_once(tmp_path):
    mesh = ToldMesh(2)
    asleep = "window.slept = 0; const awake = Date.now; Date.now = () => awake() + window.slept"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url, first=asleep)
        await page.until(SHOWN)
        opened = "performance.getEntriesByType('resource').filter((one) => one.name.includes('/v1/stream')).length"
        before = await page.run(opened)
        woken = await page.run(f"window.slept = {HOUR * 1000}; performance.now()")
        await page.until(f"{opened} > {before} && {LIVE}")
        took = (await page.run("performance.now()") - woken) / 1000
        assert took < 0.8 * SILENCE_SECONDS, (
            "it takes a second; without a look at the clock it takes all of the silence"
        )
        mesh.turn("trainer-1", "lost")
        await page.until(f"{HEADLINE}.includes('trainer-1 is lost')")


async def test_a_tab_in_the_background_holds_no_connection(tmp_path):
    """A browser has six to one service."""
    mesh = ToldMesh(2)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        first = page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        for _ in range(6):
            page = await browser.open(endpoint.url, beside=first)
            await page.until(SHOWN)
        await page.until("!document.hidden")
        assert await first.run("document.hidden")
        assert streams(first) == 0
        await first.tell("Page.bringToFront")
        mesh.turn("trainer-1", "lost")
        await first.until(f"{LIVE} && {HEADLINE}.includes('trainer-1 is lost')")
        assert first.complaints + page.complaints == []


async def test_a_service_that_has_lost_its_past_is_followed_on(tmp_path):
    mesh = ToldMesh(2)
    newest = "document.querySelector('.events li').textContent"
    for number in range(300):
        mesh.happened("quorum", "", f"quorum {number}")
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(f"{SHOWN} && {newest}.includes('quorum 299')")
        mesh.events.clear()
        mesh.cut()
        await page.until("document.querySelector('#live').dataset.live === 'no'")
        await page.until(LIVE)
        mesh.happened("joined", "trainer-1", "trainer-1 joined")
        await page.until(f"{newest}.includes('trainer-1 joined')")
        assert await page.run("document.querySelectorAll('.events li').length") == 1


async def test_a_page_that_is_looked_at_for_long_does_not_grow(tmp_path):
    mesh = ToldMesh(16)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)

        async def follow(updates: int) -> None:
            for number in range(updates):
                name = mesh.names[number % 16]
                mesh.turn(name, "training" if number % 32 >= 16 else "lost")
                mesh.spans[name] = mesh.spans[name][-50:]  # what the service knows is of a day at most
                mesh.happened("lost", name, f"{name} is lost, number {len(mesh.events)}")
                if number % 50 == 49:
                    last = len(mesh.events) - 1
                    await page.until(f"document.querySelector('.events').textContent.includes('number {last}')")

        await follow(500)
        for _ in range(3):  # a page that grows does so every time, while garbage may be collected late once
            heap, nodes = await page.memory()
            await follow(500)
            heap_later, nodes_later = await page.memory()
            grown = nodes_later >= 1.05 * nodes or heap_later >= 1.1 * heap
            if not grown:
                break
        assert not grown, f"{nodes} nodes in {heap} bytes, later {nodes_later} in {heap_later}"
        assert page.complaints == []


async def test_a_page_that_was_left_leaves_nothing_behind(tmp_path):
    async with shown(tmp_path, ToldMesh(4)) as (browser, endpoint):
        page = await browser.open(endpoint.url)

        async def to_and_fro(times: int) -> None:
            for _ in range(times):
                await page.run("location.hash = '#/cluster'")
                await page.until(f"{LIVE} && document.querySelector('tbody a')")
                await page.run(f"location.hash = '#/job/{JOB}'")
                await page.until(f"{SHOWN} && document.querySelector('.charts').textContent.includes('loss')")

        await to_and_fro(3)
        _, nodes = await page.memory()
        await to_and_fro(6)
        _, nodes_later = await page.memory()
        assert nodes_later < 2 * nodes, "the page before may still be there, and none that was before it"
        assert streams(page) == 1


async def test_a_page_that_was_chosen_while_the_first_one_loads_is_shown(tmp_path):
    choose = """const answered = fetch; window.fetch = async (path, options) => {
        const answer = await answered(path, options), read = answer.json.bind(answer);
        answer.json = async () => {
            const value = await read();
            if (!location.hash) location.hash = '#/cluster'; // the event of this comes after the answer
            return value;
        };
        return answer;
    }"""
    async with shown(tmp_path, ToldMesh(1)) as (browser, endpoint):
        page = await browser.open(endpoint.url, first=choose)
        await page.until(f"{LIVE} && document.querySelector('tbody a')")
        assert await page.run("location.hash") == "#/cluster"


async def test_a_page_whose_scripts_do_not_load_says_so(tmp_path):
    mesh = ToldMesh(1)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        assert await page.run("document.querySelector('#unloaded')") is None
        for script in ("uPlot", "words.js"):
            await page.tell("Network.setBlockedURLs", urls=[f"*{script}*"])
            await page.load(endpoint.url)
            await page.until("document.querySelector('#unloaded').checkVisibility({ visibilityProperty: true })")
