"""Decisions of the page: whom it blames, outliers, marks, folded events, orders for the whole job."""

from __future__ import annotations

import json
import time

import pytest

from keepstep_mesh.protocol.policy import SETTINGS, Policy
from tests.browser.devtools import CHROMIUM
from tests.browser.told import HEADLINE, JOB, LIVE, SHOWN, TOAST, WAITED, ToldMesh, row, shown

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed (apt-get install chromium)")

EVENTS = "document.querySelector('.events').textContent"
ORDER = "document.querySelector('#order').open"
PURE = """import(new URL('static/scales.js', location.href)).then(({limits, newest, byStep}) => [
    limits([[1, 1, 1.0000001]], false),
    limits([Array.from({length: 100}, (_, i) => i === 50 ? 90 : 1)], true),
    limits([[null, null]], true),
    newest([1, 2, null]),
    byStep([0, 1, 2, 3, 4], [10, 11, 12, 11, null], [[5, 6, 7, 8, 9]], [{t: 2.5, kind: 'failure'}]),
])"""


async def test_a_constant_is_a_line_an_outlier_is_cut_and_a_step_that_is_repeated_counts_once(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        constant, outlier, nothing, last, steps = await page.run(PURE)
        assert constant["high"] - constant["low"] >= 0.05
        assert (outlier["clipped"], outlier["highest"]) == (1, 90)
        assert outlier["high"] < 3
        assert (nothing["low"], nothing["high"], last) == (0, 1, 2)
        assert steps == {"x": [10, 11, 12], "columns": [[5, 8, 7]], "marks": [{"t": 12, "kind": "failure"}]}


async def test_the_slow_group_is_blamed_and_those_that_wait_for_it_are_not(tmp_path):
    mesh = ToldMesh(6)
    sentence = "trainer-5 is slow (125 ms, usual 55 ms): the others wait 56 % of their time"
    mesh.blame = {"slow": ["trainer-5"], "sentence": sentence}
    mesh.alerts = [
        {"name": "GroupIsAStraggler", "severity": "warning", "sentence": sentence},
        {"name": "HealsFail", "severity": "warning", "sentence": "3 heals failed"},
    ]
    for name in mesh.names[:5]:
        mesh.turn(name, "waiting_quorum")
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(f"{SHOWN} && {HEADLINE} === '{sentence}.'")
        assert "waiting for trainer-5" in await page.run(row("trainer-0"))
        assert await page.run("document.querySelectorAll('.groups tbody .state.slow').length") == 1
        assert await page.run("document.querySelector('.alerts').textContent") == "HealsFail 3 heals failed"
        assert "failed to heal: no route (14 times in a row)" in await page.run(row("trainer-1"))
        facts = await page.run("document.querySelector('.facts').textContent")
        assert "loss0.25last commit" in facts
        assert "groups1 of 6 (needs 1)" in facts
        mesh.blame = None
        mesh.turn("trainer-1", "lost")
        await page.until(f"{HEADLINE}.includes('trainer-1 is lost')")
        assert await page.run("document.querySelectorAll('[aria-label^=replace]:not([hidden])').length") == 0
        mesh.turn("trainer-1", "standby")
        await page.until(f"{HEADLINE}.includes(' of 5 groups and 1 spare in the quorum')")
        assert await page.run("document.querySelectorAll('[aria-label^=replace]:not([hidden])').length") == 5


async def test_legends_show_the_newest_values_of_each_group_over_time_and_over_steps(tmp_path):
    mesh = ToldMesh(2)
    mesh.group_values = {"trainer-0": 0.125, "trainer-1": 0.875}
    mesh.happened("lost", "trainer-1", "trainer-1 was lost", time.time() - 100)
    chart = "document.querySelector('.charts figure')"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(f"{SHOWN} && {chart}.textContent.includes('trainer-10.875')")
        assert "--" not in await page.run("document.querySelector('.charts').textContent")
        await page.click(".charts figure button")
        await page.until(f"{chart}.querySelector('.u-label').textContent.startsWith('step')")
        assert "trainer-00.125" in await page.run(f"{chart}.textContent")
        assert page.complaints == []


async def test_a_death_is_one_line_that_opens_leads_to_its_time_and_is_found(tmp_path):
    mesh, now = ToldMesh(2), time.time()
    mesh.happened("lost", "trainer-1", "trainer-1 was lost: killed", now - 100)
    mesh.happened("joined", "trainer-1", "trainer-1 joined", now - 90)
    mesh.happened("healed", "trainer-1", "trainer-1 healed: 1.0 MiB in 0.50 s", now - 89)
    mesh.happened("policy", "", "policy changed", now - 50)
    lines = "document.querySelectorAll('.events > li:not(.none)').length"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(f"{SHOWN} && {lines} === 2")
        said = "trainer-1 was lost: killed; connected again after 10 s; healed: 1.0 MiB in 0.50 s"
        assert said in await page.run(EVENTS)
        assert await page.run("document.querySelectorAll('.events li:nth-child(2) details p').length") == 3
        await page.run("document.querySelector('[aria-label^=\"Filter events\"]').focus()")
        await page.type("KILLED")
        await page.until(f"{lines} === 1")
        await page.click(".events li button")
        await page.until("!document.querySelector('.ranges [aria-pressed=true]')")
        assert page.complaints == []


async def test_an_admin_verifies_the_job_changes_its_policy_and_readmits_a_group(tmp_path):
    mesh = ToldMesh(2)
    mesh.kept_out = ["trainer-9"]
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        assert not await page.run("document.querySelector('#sign').checkVisibility()"), "this service has no tokens"
        for button, done in (
            ("[aria-label='readmit trainer-9']", "trainer-9: readmit is done"),
            (".now .orders button", ": verify is done"),
        ):
            await page.click(button)
            await page.until(ORDER)
            assert not await page.run("document.querySelector('#order-reason').checkVisibility()")
            await page.click("#order-yes")
            await page.until(f"!{ORDER}")
            await page.until(f"{TOAST} === '{done}'")
        await page.click(".now .orders button:last-child")
        await page.until("document.querySelector('#policy').open")
        told = await page.run("document.querySelector('#policy .fields').textContent")
        assert all(setting.text in told for setting in SETTINGS.values())
        await page.run("document.querySelector('#policy [name=min_replicas]').value = '3'")
        await page.click("#policy button.danger")
        await page.until(f"{TOAST} === 'Policy: min_replicas is 3'")
        assert mesh.orders == [
            *(("readmit", "trainer-9", {}), ("verify", "", {})),
            ("policy", "", {"min_replicas": 3}),
        ]
        assert page.complaints == []


async def test_the_policy_dialog_stays_until_its_values_are_right_and_an_empty_field_is_none(tmp_path):
    mesh = ToldMesh(2)
    mesh.policy = Policy(takeover_grace=30.0)
    opened, wrong = "document.querySelector('#policy').open", "document.querySelector('#policy-wrong').textContent"

    def field(name: str) -> str:
        return f"document.querySelector('#policy [name={name}]')"

    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)

        async def change(**values: str) -> None:
            for name, value in values.items():
                await page.run(f"{field(name)}.value = '{value}'")
            await page.click("#policy button.danger")

        await page.click(".now .orders button:last-child")
        await page.until(f"{opened} && document.activeElement.name === 'min_replicas'")
        assert await page.run("document.querySelector('#policy-title').textContent") == f"Policy of {JOB}"
        for value in ("0", "1.5", ""):
            await change(min_replicas=value)
            assert await page.run(f"{opened} && !{field('min_replicas')}.checkValidity()"), value
        await change(min_replicas="3", max_replicas="2", takeover_grace="")
        await page.until(f"{opened} && {wrong}.startsWith('max_replicas 2 is less than min_replicas 3')")
        assert await page.run(f"{field('min_replicas')}.value") == "3", "what was typed stays"
        await change(max_replicas="4")
        await page.until(f"{TOAST} === 'Policy: min_replicas is 3, max_replicas is 4, takeover_grace is unset'")
        assert mesh.policy == Policy(min_replicas=3, max_replicas=4, takeover_grace=None)
        await page.click(".now .orders button:last-child")
        await page.until(f"{opened} && {wrong} === ''")
        await page.click("#policy button.danger")
        await page.until(f"{TOAST} === 'Policy: nothing was changed'")
        assert all("400" in one for one in page.complaints), page.complaints


async def test_the_goodput_is_said_once_and_the_types_of_badput_name_their_source(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(SHOWN)
        said = await page.run("document.querySelector('.big').parentElement.innerText")
        assert said.startswith(f"Goodput and lost time\n\n100 %\n\n{WAITED}\n\n")
        assert "In the terms of ml-goodput-measurement: ELASTIC_REINITIALIZATION 70 ms." in said


async def test_finished_transfers_say_where_they_came_from_or_went_and_two_groups_are_not_compared(tmp_path):
    mesh, ended = ToldMesh(2), {"step": 7, "began": time.time() - 9, "ended": time.time(), "bytes_done": 1}
    mesh.transfers = [
        {"kind": "heal", "name": "trainer-1", "source": "trainer-0", "via": "relay", **ended},
        {"kind": "upload", "name": "live-1", "source": "", "via": "relay-1", **ended},
    ]
    cells = "[...document.querySelectorAll('[aria-label=\"Finished transfers\"] tbody tr')].map((row) => row.innerText)"
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(endpoint.url)
        await page.until(f"{SHOWN} && {cells}.length === 2")
        told = "\n".join(await page.run(cells))
        assert "from trainer-0, relay" in told
        assert "to relay-1" in told
        slow = await page.run("document.querySelector('[aria-label=Stragglers]').parentElement.textContent")
        assert "Fewer than three groups have step times" in slow
        assert page.complaints == []


async def test_on_a_phone_the_numbers_stay_and_the_buttons_go(tmp_path):
    async with shown(tmp_path, ToldMesh(2)) as (browser, endpoint):
        page = await browser.open(endpoint.url, width=390, height=844)
        await page.until(SHOWN)
        visible = "[...document.querySelectorAll('.groups tbody {}')].filter((one) => one.checkVisibility()).length"
        assert await page.run(visible.format(".orders button")) == 0
        for head in ("step", "busy time", "loss", "restarts"):
            assert await page.run(visible.format(f"td[data-head={json.dumps(head)}]")) == 2


async def test_the_cluster_page_shows_the_state_of_each_job_alerts_the_fill_of_relays_and_versions(tmp_path):
    mesh = ToldMesh(2)
    mesh.alerts = [{"name": "HealsFail", "severity": "warning", "sentence": "3 heals failed"}]
    async with shown(tmp_path, mesh) as (browser, endpoint):
        page = await browser.open(f"{endpoint.url}/#/cluster")
        await page.until(f"{LIVE} && document.querySelector('.code')?.textContent === 'standing'")
        text = await page.run("document.querySelector('#page').innerText")
        for said in (
            "waiting for 1 of 3",
            "0.1.0, Python 3.11.7",
            "memory 50.0 % of 1.0 GiB; in 2.0 MiB/s, out 5.0 MiB/s",
            "disk: true, memory: 1.0 GiB",
        ):
            assert said in text
        assert "etcd, a read takes 2 ms" in text
        alerts = await page.run("document.querySelector('.alerts').innerText")
        assert "HealsFail digits 3 heals failed" in alerts
        assert "lighthouse at http://10.0.0.2:29510 does not answer" in alerts
        drawn = "[...document.querySelector('.spark').getContext('2d').getImageData(0, 0, 120, 22).data].some(Boolean)"
        assert await page.run(drawn)
        assert page.complaints == []
