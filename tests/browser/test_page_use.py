"""Use of the page: tokens, orders, keyboard and touch, narrow and wide screens, dark mode."""

from __future__ import annotations

import time

import pytest

from keepstep_mesh.security.tokens import Tokens
from tests.browser.devtools import CHROMIUM
from tests.browser.told import HEADLINE, JOB, LIVE, SHOWN, TOAST, ToldMesh, row, shown

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)")

WORKER, ADMIN = "w" * 20, "a" * 20
TOKENS = Tokens(worker=WORKER, admin=ADMIN)
ASKED = "document.querySelector('#token').open"
ORDER = "document.querySelector('#order').open"
LONG = "n" * 120
ASKED_RANGES = """performance.getEntriesByType('resource').map((one) => new URL(one.name))
    .filter((one) => one.pathname.endsWith('/timeline') && one.searchParams.has('until'))
    .map((one) => one.searchParams.get('until') - one.searchParams.get('since'))"""


async def test_the_question_for_a_token_can_be_closed(tmp_path):
    async with shown(tmp_path, ToldMesh(2), TOKENS) as (browser, endpoint):
        page = await browser.open(endpoint.url, token=WORKER)
        await page.until(SHOWN)
        await page.click("#sign")
        await page.until(ASKED)
        await page.press("Escape")
        await page.until(f"!{ASKED}")
        await page.click("#sign")
        await page.until(ASKED)
        await page.click("#token-cancel")
        await page.until(f"!{ASKED}")
        assert await page.run("sessionStorage.getItem('keepstep-token')") == WORKER


async def test_a_token_that_is_asked_for_cannot_be_left_out(tmp_path):
    async with shown(tmp_path, ToldMesh(2), TOKENS) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(ASKED)
        assert not await page.run("document.querySelector('#token-cancel').checkVisibility()")
        for _ in range(3):
            await page.press("Escape")
        await page.until(ASKED)
        await page.run("document.querySelector('#token-value').focus()")
        await page.type(ADMIN)
        await page.press("Enter")
        await page.until(SHOWN)


async def test_a_token_that_no_request_can_carry_is_not_taken(tmp_path):
    async with shown(tmp_path, ToldMesh(2), TOKENS) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(ASKED)
        await page.run("document.querySelector('#token-value').focus()")
        await page.type("ключ" * 5)
        await page.press("Enter")
        await page.until("document.querySelector('#token-value').validity.patternMismatch")
        assert await page.run(ASKED)
        await page.run("document.querySelector('#token-value').select()")
        await page.type(f" {ADMIN} ")
        await page.press("Enter")
        await page.until(SHOWN)
        assert await page.run("sessionStorage.getItem('keepstep-token')") == ADMIN


async def test_a_token_that_is_taken_back_is_asked_for_again_and_the_new_one_brings_its_role(tmp_path):
    offered = "[...document.querySelectorAll('.groups .orders button')].filter((one) => one.checkVisibility()).length"
    async with shown(tmp_path, ToldMesh(2), TOKENS) as (browser, endpoint):
        page = await browser.open(endpoint.url, token=WORKER)
        await page.until(SHOWN)
        assert await page.run(offered) == 0
        await page.run("sessionStorage.setItem('keepstep-token', 'one that is taken back')")
        await page.until(ASKED)
        await page.until("document.querySelector('#token').textContent.includes('the token is wrong')")
        await page.run("document.querySelector('#token-value').focus()")
        await page.type(ADMIN)
        await page.press("Enter")
        await page.until(f"{SHOWN} && {offered} === 4")


async def test_enter_confirms_an_order_that_has_a_reason_and_cancels_one_without(tmp_path):
    mesh = ToldMesh(2)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        for reason in ("", "bad GPU"):
            await page.click("[aria-label='evict trainer-1']")
            await page.until(f"{ORDER} && document.activeElement.id === 'order-reason'")
            await page.type(reason)
            await page.press("Enter")
            await page.until(f"!{ORDER}")
        await page.until(f"{TOAST} === 'trainer-1: evict is done'")
        assert mesh.orders == [("evict", "trainer-1", {"reason": "bad GPU"})]


async def test_an_order_is_for_the_job_that_is_shown_while_another_one_is_loaded(tmp_path):
    mesh = ToldMesh(2)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        mesh.held.clear()
        await page.run("location.hash = '#/job/other'")
        await page.until("document.querySelector('#live').dataset.live === 'no'")
        await page.click("[aria-label='evict trainer-1']")
        await page.click("#order-yes")
        await page.until(f"{TOAST} === 'trainer-1: evict is done'")
        assert mesh.orders == [("evict", "trainer-1", {"reason": "from the dashboard"})]


async def test_the_skip_link_leads_to_the_content_of_the_page_that_is_shown(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        page = await browser.open(f"{endpoint.url}/#/cluster")
        await page.until(f"{LIVE} && document.querySelector('tbody a')")
        await page.run("document.querySelector('.skip').focus()")
        await page.press("Enter")
        await page.until("document.activeElement.id === 'page'")
        assert await page.run("location.hash") == "#/cluster"


async def test_from_the_page_of_the_cluster_each_job_can_be_chosen(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        page = await browser.open(f"{endpoint.url}/#/cluster")
        await page.until(f"{LIVE} && document.querySelector('tbody a')")
        await page.run("document.querySelector('#jobs').focus()")
        await page.press(JOB[0])
        await page.until(f"{SHOWN} && {HEADLINE}.startsWith('2 of 2 groups')")
        assert await page.run("location.hash") == f"#/job/{JOB}"


async def test_the_focus_stays_on_a_group_when_another_one_leaves(tmp_path):
    mesh = ToldMesh(4)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        await page.run("document.querySelector('[aria-label=\"drain trainer-2\"]').focus()")
        mesh.leave("trainer-1")
        await page.until(f"{HEADLINE}.startsWith('3 of 3 groups')")
        assert await page.run("document.activeElement.getAttribute('aria-label')") == "drain trainer-2"


async def test_a_finger_picks_a_group(tmp_path):
    async with shown(tmp_path, ToldMesh(3)) as (browser, endpoint):
        page = await browser.open(endpoint.url, width=360, height=740)
        await page.tell("Emulation.setTouchEmulationEnabled", enabled=True)
        await page.until(SHOWN)
        await page.run("document.querySelector('.timeline').scrollIntoView()")
        left, top = await page.run(
            "(({left, top}) => [left, top])(document.querySelector('.timeline').getBoundingClientRect())"
        )
        point = {"x": left + 150, "y": top + 32}
        await page.tell("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
        await page.tell("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
        charts = "document.querySelector('.charts').textContent"
        await page.until(f"{charts}.includes('trainer-0')")
        assert "trainer-1" not in await page.run(charts)


async def test_a_range_has_the_length_of_a_day_at_most_and_ends_now_at_the_latest(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        # a page keeps 250 entries unless told otherwise, fewer than a slow machine needs
        page = await browser.open(endpoint.url, first="performance.setResourceTimingBufferSize(100000)")
        await page.until(SHOWN)
        await page.run("document.querySelector('.timeline').focus()")
        for key in ["-"] * 60 + ["ArrowRight"] * 3:
            await page.press(key)
        await page.until(f"{ASKED_RANGES}.some((one) => one > 86399)")
        last = "performance.getEntriesByType('resource').findLast((one) => one.name.includes('until')).name"
        assert await page.run(f"Number(new URL({last}).searchParams.get('until'))") < time.time() + 1
        assert max(await page.run(ASKED_RANGES)) < 86401
        for _ in range(30):
            await page.press("+")
        await page.until(f"{ASKED_RANGES}.some((one) => one < 2)")
        assert min(await page.run(ASKED_RANGES)) >= 1
        assert page.complaints == []


async def test_a_job_that_all_have_left_is_not_said_to_train(tmp_path):
    mesh = ToldMesh(1)
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(f"{HEADLINE} === '1 of 1 group in the quorum, all training.'")
        mesh.leave("trainer-0")
        await page.until(f"{HEADLINE} === 'No group is running.'")
        assert page.complaints == []


async def test_a_heal_of_which_the_size_is_not_known_has_no_share(tmp_path):
    mesh = ToldMesh(2)
    mesh.heals["trainer-1"] = {"bytes_done": 1 << 20, "bytes_total": 0, "bytes_per_second": 1 << 20,
                               "seconds_left": None, "via": "", "source": "trainer-0"}  # fmt: skip
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        said = "document.querySelector('.heals').textContent"
        assert await page.run(said) == "trainer-1 is healing from trainer-01.0 MiB, 1.0 MiB/s"
        assert await page.run("document.querySelector('progress').position") == -1


@pytest.mark.parametrize("width", [320, 768, 3840])
async def test_names_of_128_letters_widen_nothing(tmp_path, width):
    mesh = ToldMesh(3)
    for number in range(3):
        mesh.names.append(f"{LONG}-{number:07}")
        mesh.spans[mesh.names[-1]] = [[mesh.t0, None, "training"]]
    long = mesh.names[-1]
    mesh.turn(long, "healing")
    mesh.heals[long] = {"bytes_done": 1, "bytes_total": 4, "bytes_per_second": 1e6, "seconds_left": 3.1, "via": LONG,
                        "source": mesh.names[-2]}  # fmt: skip
    outside = "one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('.scroll') && one.checkVisibility()"
    over = f"[...document.querySelectorAll('body *')].filter((one) => {outside}).map((one) => one.className || one.id)"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(f"{endpoint.url}/#/job/{LONG}", width=width, height=900)
        await page.until(LIVE)
        assert await page.run(over) == []
        await page.run(f"location.hash = '#/job/{JOB}'")
        await page.until(f"{SHOWN} && document.querySelector('#jobs').value === '{JOB}'")
        await page.run("document.querySelector('[aria-label=Groups] tr:last-child button.link').click()")
        await page.click(f"[aria-label='evict {long}']")
        await page.until(ORDER)
        assert await page.run(over) == []
        await page.click("#order-yes")
        await page.until(f"{TOAST}?.includes('{long}')")
        assert await page.run(over) == []
        assert await page.run("document.documentElement.scrollWidth") <= width
        groups = "document.querySelector('[aria-label=Groups]')"
        assert await page.run(f"{groups}.scrollWidth <= {groups}.clientWidth"), "who looks for a button has to scroll"


CONTRASTS = """(() => {
    const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
    const light = (colour) => {
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        const parts = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((one) => one / 255);
        const [r, g, b] = parts.map((one) => (one <= 0.03928 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const below = (node) => {
        const colour = getComputedStyle(node).backgroundColor;
        return colour === 'rgba(0, 0, 0, 0)' && node.parentElement ? below(node.parentElement) : colour;
    };
    const says = (node) => [...node.childNodes].some((one) => one.nodeType === 3 && one.data.trim());
    return [...document.querySelectorAll('body *')].filter((one) => says(one) && one.checkVisibility()).map((one) => {
        const [dark, bright] = [light(getComputedStyle(one).color), light(below(one))].sort((a, b) => a - b);
        return [(bright + 0.05) / (dark + 0.05), `${one.tagName} ${one.className} ${one.textContent.slice(0, 30)}`];
    });
})()"""


@pytest.mark.parametrize("dark", [False, True])
async def test_every_text_can_be_read(tmp_path, dark):
    """Contrast by WCAG 2, level AA."""
    mesh = ToldMesh(7)
    for name, state in zip(mesh.names, ["lost", "healing", "retrying", "draining", "waiting_quorum"], strict=False):
        mesh.turn(name, state)
    mesh.happened("lost", "trainer-0", "trainer-0 is lost")
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url, dark=dark)
        await page.until(f"{SHOWN} && {row('trainer-5')}.includes('straggler')")
        await page.click("[aria-label='evict trainer-1']")
        await page.click("#order-yes")
        await page.until(TOAST)
        await page.run(
            "document.querySelector('#problem').hidden = false, document.querySelector('#problem').append('x')"
        )
        found = await page.run(CONTRASTS)
        assert len(found) > 100
        assert [said for ratio, said in found if ratio < 4.5] == []
