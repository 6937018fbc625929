"""Alert rules and dashboards against a real Prometheus that asks real services: every query gives data."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import yaml

from keepstep_lighthouse.api.prometheus import FROM_ZERO
from keepstep_mesh.protocol.messages import Healing, ShardReport, Welcome
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.security.tokens import Tokens
from keepstep_metrics.history.findings.alerts import SEVERITIES
from tests.support.network.ports import free_port
from tests.support.services import metrics_driver
from tests.support.services.command import killed_at_the_end
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import DEADLINE, connection, lighthouse, round_of
from tests.support.services.relay_driver import client, relay, state

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana" / "dashboards").glob("*.json"))
RULES = yaml.safe_load((DEPLOY / "prometheus" / "rules.yml").read_text())["groups"]
ALERTS = {rule["alert"]: rule["expr"] for group in RULES for rule in group["rules"]}
TOKENS = Tokens(worker="worker-token-of-the-test", service="service-token-of-the-test")

needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")), reason="needs Prometheus: apt-get install prometheus"
)


def queries() -> Iterator[tuple[str, str]]:
    """Where each query of a dashboard stands, and the query with Grafana's variables filled in."""
    for file in DASHBOARDS:
        for panel in json.loads(file.read_text())["panels"]:
            for target in panel["targets"]:
                query = target["expr"]
                for variable, value in (("$__rate_interval", "30s"), ("$__range", "30s"), ("$job", "job")):
                    query = query.replace(variable, value)
                assert "$" not in query, f"{file.name}, {panel['title']}: a variable that nothing fills in"
                yield f"{file.stem}: {panel['title']}: {target['refId']}", query


def configuration(folder: Path, port_of: dict[str, str]) -> Path:
    """Write the configuration of ``deploy`` with other addresses, another token file, and a shorter interval."""
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    for target, at in port_of.items():
        assert f'"{target}"' in text
        text = text.replace(f'"{target}"', f'"{at}"')
    (folder / "token").write_text(TOKENS.service)
    text = text.replace("/var/lib/keepstep/prometheus-token/token", str(folder / "token")).replace("5s", "250ms")
    (folder / "rules.yml").write_text((DEPLOY / "prometheus" / "rules.yml").read_text())
    (folder / "prometheus.yml").write_text(text)
    return folder / "prometheus.yml"


class Prometheus:
    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self._http = http
        self._address = address

    async def get(self, path: str, **parameters: str) -> Any:
        async with self._http.get(f"{self._address}/api/v1/{path}", params=parameters) as answer:
            body = await answer.json()
            assert body["status"] == "success", (parameters, body)
            return body["data"]

    async def value(self, query: str) -> list[Any]:
        return (await self.get("query", query=query))["result"]

    async def until(self, query: str, where: str) -> None:
        """Returns when ``query`` gives data that are numbers. AssertionError when it does not."""
        try:
            async with asyncio.timeout(DEADLINE):
                while True:  # Prometheus has no event for it
                    found = [one["value"][1] for one in await self.value(query)]
                    if found and "NaN" not in found:
                        return
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise AssertionError(f"{where}: no data for {query}") from None


@asynccontextmanager
async def prometheus(folder: Path, config: Path) -> AsyncIterator[Prometheus]:
    port = free_port()
    flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", "--log.level=error"]
    async with (
        killed_at_the_end("prometheus", *flags, f"--web.listen-address=127.0.0.1:{port}"),
        aiohttp.ClientSession() as http,
    ):
        one = Prometheus(http, f"http://127.0.0.1:{port}")
        async with asyncio.timeout(DEADLINE):
            while True:
                try:
                    await one.get("status/runtimeinfo")
                    break
                except (aiohttp.ClientError, ValueError):
                    await asyncio.sleep(0.1)  # it does not tell that it listens
        yield one


async def train(address: str, history: metrics_driver.Client) -> None:
    """A job of four groups, one of which is lost: steps, heals, some that are discarded, shards. Until cancelled."""
    bearer = {"Authorization": f"Bearer {TOKENS.worker}"}
    async with contextlib.AsyncExitStack() as stack:
        members = [await stack.enter_async_context(connection(address, f"r{n}:1", **bearer)) for n in range(4)]
        for member in members:
            await member.hello()
            await member.next(Welcome)
        await round_of(members)
        members.pop().cut()
        (quorum, *_) = await round_of(members)
        for seat, member in enumerate(members):
            keepers = (members[seat - 1].replica_id,)
            await member.send(ShardReport(quorum.quorum_id, seat, 3, 4, "resized", 0, 0.5, 100, keepers, formed=True))
        tellers = [metrics_driver.Teller(member.replica_id) for member in members]
        for number in itertools.count(1):
            for teller in tellers:
                await history.tell(teller, metrics_driver.step(time.time(), number, 0.05, busy_seconds=0.04))
            await history.tell(tellers[0], {"kind": "durable", "t": time.time(), "step": number, "every": 1})
            await round_of(members, number, commit_failures=int(number % 10 == 9))
            told = Healing(1000, 1000, 500.0, number, "r1:1", "direct", 2.0)
            await members[0].send(told, replace(told, ended=True))
            await asyncio.sleep(0.05)  # a step


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[Prometheus]:
    """etcd, two lighthouses, a relay with something in it, metrics, a job that trains, and who asks them all."""
    settings = {"policy": Policy(reconnect_grace=0.1), "tokens": TOKENS}
    async with contextlib.AsyncExitStack() as stack:
        etcd = stack.enter_context(EtcdCluster(folder / "etcd", flags=("--unsafe-no-fsync=false",)))
        store = f"{etcd.address}/test"
        leader = await stack.enter_async_context(lighthouse(store=store, **settings))
        standby = await stack.enter_async_context(lighthouse(store=store, **settings))
        chunks = await stack.enter_async_context(relay(lighthouses=(leader.address,), tokens=TOKENS))
        uploader = await stack.enter_async_context(client(chunks.address, TOKENS.worker))
        await uploader.store(state(1, 1000))
        metrics = await stack.enter_async_context(
            metrics_driver.metrics(lighthouses=(leader.address,), tokens=TOKENS, data_dir=folder / "metrics")
        )
        history = await stack.enter_async_context(metrics_driver.client(metrics.address, TOKENS.worker))
        at = {"lighthouse-1:29510": leader.address, "lighthouse-2:29510": standby.address}
        at |= {
            "relay:29520": chunks.address,
            "metrics:29530": metrics.address,
            "etcd:2379": etcd.address.replace("etcd://", "http://"),
        }
        config = configuration(folder, {target: urlsplit(address).netloc for target, address in at.items()})
        async with asyncio.TaskGroup() as tasks:
            training = tasks.create_task(train(leader.address, history))
            async with prometheus(folder, config) as one:
                yield one
            training.cancel()


@needs_prometheus
async def test_every_query_of_dashboards_and_alerts_finds_the_metrics_that_it_names(tmp_path: Path) -> None:
    async with scene(tmp_path) as one:
        for where, query in queries():
            await one.until(query, where)
        for alert, expression in ALERTS.items():
            if alert == "CertificateEndsSoon":
                continue  # the services of the scene have no TLS
            for selector in re.findall(r"\b(?:keepstep|etcd)_\w+(?:\{.*?\})?|\bup\{.*?\}", expression):
                await one.until(re.sub(r"kind=~?\".*?\"", "", selector), alert)
        found = {rule["name"]: rule for group in (await one.get("rules"))["groups"] for rule in group["rules"]}
        assert set(found) == set(ALERTS)
        assert {rule["health"] for rule in found.values()} == {"ok"}
        assert [name for name, rule in found.items() if rule["state"] == "firing"] == []


def test_every_kind_of_event_that_a_query_names_is_logged_by_the_lighthouse_and_counted_from_zero() -> None:
    code = "".join(file.read_text() for file in (DEPLOY.parent / "services/keepstep_lighthouse").rglob("*.py"))
    asked = [*ALERTS.values(), *(query for _, query in queries())]
    kinds = {kind for text in asked for found in re.findall(r"kind=~?\"(.*?)\"", text) for kind in found.split("|")}
    assert kinds == set(FROM_ZERO)
    assert not [kind for kind in kinds if f'"{kind}"' not in code]


def test_the_page_and_its_document_have_the_alerts_of_the_rules_for_training() -> None:
    (training,) = (group["rules"] for group in RULES if group["name"] == "training")
    assert {rule["alert"]: rule["labels"]["severity"] for rule in training} == SEVERITIES
    section = (DEPLOY.parent / "docs" / "metrics.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    assert re.findall(r"(?m)^\| `(\w+)` \|", section) == list(SEVERITIES)


FIRING = {
    "TrainingStands": ['keepstep_steps_total{job="j"} 7x60', 'keepstep_groups{job="j",state="asking"} 2x60'],
    "GroupsAreLostOften": ['keepstep_group_failures_total{job="j"} 0+1x60'],
    "StepsAreDiscarded": [
        'keepstep_group_steps_total{job="j",outcome="committed"} 0+9x60',
        'keepstep_group_steps_total{job="j",outcome="discarded"} 0+1x60',
    ],
    "GoodputIsLow": ['keepstep_job_goodput_ratio{job="j"} 0.7x60'],
    "GroupIsAStraggler": ['keepstep_group_straggler{job="j",group="r1"} 1x60'],
    "JobWentBack": ['keepstep_events_total{job="j",kind="went_back"} 0+1x60'],
    "JobFailed": ['keepstep_events_total{job="j",kind="job_failed"} 0+1x60'],
    "HealsFail": ['keepstep_events_total{job="j",kind="heal_failed"} 0+1x60'],
    "ContributionNotFinite": ['keepstep_events_total{job="j",kind="nonfinite"} 0+1x60'],
    "MemberIsExposed": ['keepstep_one_copy_exposed{job="j"} 1x60'],
    "ShardsAreLost": ['keepstep_events_total{job="j",kind="shards_lost"} 0+1x60'],
    "CheckpointIsOld": [
        'keepstep_job_durable_age_steps{job="j"} 0+10x60',
        'keepstep_job_durable_every_steps{job="j"} 10x60',
        'keepstep_job_durable_age_seconds{job="j"} 0+60x60',
        'keepstep_job_groups{job="j",state="training"} 1x60',
    ],
    "CheckpointWasSkipped": ['keepstep_job_durable_skipped_total{job="j"} _x44 1x15'],
    "GroupHangs": ['keepstep_events_total{job="j",kind="hung"} 0+1x60'],
    "GroupEnded": ['keepstep_incidents_total{job="j",verdict="machine"} 0+1x60'],
    "CollectivesDiffer": ['keepstep_events_total{job="j",kind="collectives_differ"} 0+1x60'],
    "OptimizersDiffer": ['keepstep_events_total{job="j",kind="values_differ"} 0+1x60'],
    "PortsMislead": ['keepstep_events_total{job="j",kind="port_misled"} 0+1x60'],
    "ReplicasDiffer": ['keepstep_events_total{job="j",kind="replicas_differ"} 0+1x60'],
    "NobodyLeads": ['keepstep_lighthouse_ready{instance="a"} 0x60'],
    "TwoLead": ['keepstep_lighthouse_ready{instance="a"} 1x60', 'keepstep_lighthouse_ready{instance="b"} 1x60'],
    "NobodyStandsBy": ['keepstep_lighthouse_standbys{instance="a"} 0x60'],
    "StoreFails": ['keepstep_lighthouse_store_trouble{instance="a"} 1x60'],
    "ServiceIsDown": ['up{job="keepstep",instance="a"} 0x60'],
    "CertificateEndsSoon": ['keepstep_certificate_end_timestamp_seconds{instance="a"} 1200000x60'],
    "RelayDiskFails": ['keepstep_relay_disk_trouble{instance="a"} 1x60'],
    "RelayDurableTierIsBehind": ['keepstep_relay_durable_behind{instance="a"} 1x60'],
    "RelayHasDamage": ['keepstep_relay_damaged_chunks_total{instance="a",where="disk"} 0+1x60'],
    "RelayHasDamagedCheckpoints": ['keepstep_relay_damaged_checkpoints{instance="a"} 1x60'],
    "RelayIsNotRegistered": ['keepstep_relay_registered{instance="a"} 0x60'],
    "MetricsAreNotWritten": ['keepstep_metrics_store_trouble{instance="a"} 1x60'],
    "HistoryIsDropped": ['keepstep_metrics_sender_dropped_records_total{instance="a"} 0+1x60'],
    "EtcdHasNoLeader": ['etcd_server_has_leader{instance="a"} 0x60'],
    "EtcdIsSlow": [
        'etcd_disk_wal_fsync_duration_seconds_bucket{instance="a",le="0.5"} 0x60',
        'etcd_disk_wal_fsync_duration_seconds_bucket{instance="a",le="1"} 0+5x60',
        'etcd_disk_wal_fsync_duration_seconds_bucket{instance="a",le="+Inf"} 0+5x60',
    ],
}
"""For each alert, series of an hour, a value a minute, by the end of which it fires."""


def check_firing(alert: str, shown: list[str], count: int, folder: Path) -> None:
    """Check that ``alert`` fires ``count`` times after 50 minutes of the series ``shown``."""
    series = [dict(zip(("series", "values"), one.rsplit("} ", 1), strict=True)) for one in shown]
    series = [{"series": one["series"] + "}", "values": one["values"]} for one in series]
    told = [{"expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}}) or vector(0)', "eval_time": "50m"}]
    told[0]["exp_samples"] = [{"labels": "{}", "value": count}]
    test = {"interval": "1m", "input_series": series, "promql_expr_test": told}
    (folder / "test.yml").write_text(
        yaml.safe_dump({"rule_files": [str(DEPLOY / "prometheus" / "rules.yml")], "tests": [test]})
    )
    done = subprocess.run(
        ["promtool", "test", "rules", folder / "test.yml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_when_what_it_is_about_has_happened(alert: str, tmp_path: Path) -> None:
    check_firing(alert, FIRING[alert], 1, tmp_path)


@needs_prometheus
@pytest.mark.parametrize(
    ("values", "count"),
    [
        pytest.param("1x10 stale", 1, id="the pod does not exist any more"),
        pytest.param("1x10 0x2 stale", 1, id="it failed before"),
        pytest.param("1x10 _x5 1x40", 0, id="another pod of its name runs"),
        pytest.param("1x60", 0, id="it runs"),
    ],
)
def test_a_service_whose_target_disappears_is_down(values: str, count: int, tmp_path: Path) -> None:
    check_firing("ServiceIsDown", [f'up{{job="keepstep",instance="relay-0"}} {values}'], count, tmp_path)


@needs_prometheus
@pytest.mark.parametrize(("days", "count"), [(13, 1), (15, 0)])
def test_a_certificate_is_reported_two_weeks_before_its_end(days: int, count: int, tmp_path: Path) -> None:
    series = f'keepstep_certificate_end_timestamp_seconds{{instance="a"}} {days * 86400 + 3000}x60'
    check_firing("CertificateEndsSoon", [series], count, tmp_path)
