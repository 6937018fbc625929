"""docker-compose.yml says what it has to of every service, and nothing that is not there. No docker is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from keepstep_cli.main import main
from keepstep_mesh.serving.service import STOP_SECONDS

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
LOCAL = yaml.safe_load((DEPLOY / "docker-compose.local.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
LASTING = sorted(set(SERVICES) - {"setup"})
"""``setup`` ends when its work is done."""
COMMANDS = {
    name: one["command"] for name, one in SERVICES.items() if one.get("command", [""])[0] in main.all_commands()
}
"""Those that run `keepstep`."""
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def mounts(service: dict[str, Any]) -> list[list[str]]:
    return [one.split(":") for one in service.get("volumes", [])]


def filled_in(text: str) -> str:
    """With the defaults of its variables."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_has_a_user_that_is_not_root_and_limits_and_keeps_no_rights(name: str) -> None:
    service = SERVICES[name]
    assert re.fullmatch(r"[1-9]\d*:\d+", service["user"])
    assert {"mem_limit", "cpus", "pids_limit", "restart", "logging"} <= set(service)
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]


@pytest.mark.parametrize("name", LASTING)
def test_every_service_is_checked_and_started_again_when_it_dies(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert {"interval", "timeout", "retries", "start_period"} <= set(service["healthcheck"])
    # a trainer that is done stays so
    assert service["restart"] == ("on-failure" if name == "trainer" else "unless-stopped")


def test_a_stop_leaves_everybody_more_time_than_they_give_themselves() -> None:
    to_groups = next(one.default for one in main.all_commands()["run"].params if one.name == "grace")
    for service in SERVICES.values():
        assert float(service["stop_grace_period"].removesuffix("s")) > max(STOP_SECONDS, to_groups)


def test_there_are_as_many_trainers_as_the_job_is_told_to_have() -> None:
    trainer = SERVICES["trainer"]
    assert trainer["scale"] == trainer["environment"]["TRAINERS"]
    for name in ("lighthouse-1", "lighthouse-2"):
        assert f"--initial-replicas={trainer['scale']}" in SERVICES[name]["command"]


def test_it_is_for_compose_1_29_and_2() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "volumes"}, "2 warns of `version`"
    assert not [name for name, service in SERVICES.items() if "deploy" in service], "1.29 passes it over"


@pytest.mark.parametrize("name", [name for name, one in SERVICES.items() if "build" not in one])
def test_an_image_that_is_pulled_is_named_by_an_exact_tag(name: str) -> None:
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_of_a_command_is_one_that_it_has(name: str) -> None:
    command, *flags = COMMANDS[name]
    parser = main.all_commands()[command]
    known = {option for one in parser.params if isinstance(one, click.Option) for option in one.opts}
    assert flags
    assert not [flag for flag in flags if flag.split("=")[0] not in known]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_of_a_flag_is_one_that_the_command_takes(name: str) -> None:
    command, *flags = [filled_in(word) for word in COMMANDS[name] if "token-file" not in word]  # it is not there now
    with main.all_commands()[command].make_context(command, flags) as context:
        assert len([value for value in context.params.values() if value is not None]) >= len(flags)


def test_the_example_takes_the_flags_that_the_trainer_gives_it() -> None:
    script, *flags = SERVICES["trainer"]["command"]
    example = (ROOT / "examples" / Path(script).name).read_text()
    assert flags
    assert not [flag for flag in flags if f'add_argument("{flag.split("=")[0]}"' not in example]


def test_every_variable_of_keepstep_is_one_that_it_reads() -> None:
    text = "\n".join(file.read_text() for folder in ("libs", "services") for file in (ROOT / folder).rglob("*.py"))
    for name, service in SERVICES.items():
        for variable in service.get("environment", {}):
            if of_service := re.fullmatch(r"KEEPSTEP_(LIGHTHOUSE|RELAY|METRICS)_(\w+)", variable):
                parser = main.all_commands()[of_service[1].lower()]
                assert of_service[2].lower() in {one.name for one in parser.params}, f"{name}: {variable}"
            elif variable.startswith("KEEPSTEP_"):
                assert f'"{variable}"' in text, f"{name}: {variable}"


def test_every_volume_is_declared_and_used_and_every_folder_is_there() -> None:
    used = {source for service in SERVICES.values() for source, *_ in mounts(service)}
    assert {source for source in used if not source.startswith(".")} == set(COMPOSE["volumes"])
    assert not [source for source in used if source.startswith(".") and not (ROOT / source).is_dir()]


def test_a_volume_is_first_mounted_where_the_image_has_a_folder_that_belongs_to_its_user() -> None:
    folders = re.search(r"for folder in (.*?);", DOCKERFILE)[1].split()
    ours = [service for name, service in SERVICES.items() if name not in ("grafana", "prometheus", "etcd")]
    targets = {target for service in ours for _, target, *_ in mounts(service)}
    assert targets == {f"/var/lib/keepstep/{folder}" for folder in folders}
    by_setup = {source for source, *_ in mounts(SERVICES["setup"])}
    for name in ("prometheus", "etcd"):
        assert {source for source, *_ in mounts(SERVICES[name]) if not source.startswith(".")} <= by_setup
        assert "setup" in SERVICES[name]["depends_on"]


def test_only_services_see_the_tokens_of_all_roles() -> None:
    writable = [name for name, one in SERVICES.items() for m in mounts(one) if m[0] == "tokens" and m[-1] != "ro"]
    assert writable == ["setup"]
    readers = {name for name, one in SERVICES.items() for m in mounts(one) if m[0] == "tokens"} - {"setup"}
    assert readers == set(COMMANDS)


def test_ports_are_published_on_this_machine_only_unless_it_is_said() -> None:
    published = [filled_in(port) for service in SERVICES.values() for port in service.get("ports", [])]
    assert published
    assert not [port for port in published if not port.startswith("127.0.0.1:")]
    assert len({port.split(":")[1] for port in published}) == len(published)


def test_nobody_waits_for_what_does_not_come() -> None:
    for service in SERVICES.values():
        waits = service.get("depends_on", {})
        for other, how in waits.items() if isinstance(waits, dict) else [(name, {}) for name in waits]:
            condition = how.get("condition", "service_started")
            assert other in SERVICES
            assert (condition == "service_completed_successfully") == (other == "setup")


def test_prometheus_asks_every_service_that_has_metrics_where_it_listens() -> None:
    asked = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    targets = {target for job in asked for group in job["static_configs"] for target in group["targets"]}
    listens = {
        f"{name}:{found[1]}"
        for name, words in COMMANDS.items()
        if (found := re.search(r"--bind=\S+:(\d+)", str(words)))
    }
    assert targets == listens | {"etcd:2379"}
    bearer = next(job["authorization"]["credentials_file"] for job in asked if "authorization" in job)
    assert str(Path(bearer).parent) in {target for _, target, *_ in mounts(SERVICES["prometheus"])}


def test_the_local_override_builds_what_cannot_be_pulled_and_leaves_the_rest_out() -> None:
    pulled = {name for name, service in SERVICES.items() if "build" not in service}
    stages = re.findall(r"AS (\w+)$", (DEPLOY / "local" / "Dockerfile").read_text(), re.MULTILINE)
    built = {name for name in pulled if LOCAL["services"][name].get("build", {}).get("target") in stages}
    left_out = {name for name in pulled if "profiles" in LOCAL["services"][name]}
    assert built | left_out == pulled
    assert left_out == {"grafana"}


def test_every_stage_that_is_built_is_in_the_dockerfile_and_the_services_have_no_torch() -> None:
    stages = re.findall(r"AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert {service["build"]["target"] for service in SERVICES.values() if "build" in service} <= set(stages)
    command = [sys.executable, DEPLOY / "needs.py", *re.search(r"needs.py (services.*?) >", DOCKERFILE)[1].split()]
    needs = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert any(need.startswith("aiohttp") for need in needs)
    assert not [need for need in needs if need.startswith(("torch", "numpy"))]


def test_the_documentation_names_every_service_with_its_port_and_every_variable() -> None:
    page = (ROOT / "docs" / "compose.md").read_text()
    table = {name: row for row in page.splitlines() if row.startswith("| `") for name in SERVICES if f"`{name}`" in row}
    assert set(table) == set(SERVICES)
    for name, service in SERVICES.items():
        assert all(filled_in(port).split(":")[1] in table[name] for port in service.get("ports", []))
    text = "".join(file.read_text() for file in (ROOT / "docker-compose.yml", *DEPLOY.glob("*.yml")))
    assert not [one for one in re.findall(r"\$\{(\w+)", text) if f"`{one}`" not in page and f" {one}=" not in page]


def test_with_tls_every_service_of_ours_has_a_certificate_and_everybody_the_ca() -> None:
    tls = yaml.safe_load((DEPLOY / "docker-compose.tls.yml").read_text())["services"]
    for name, (command, *_) in COMMANDS.items():
        assert f"KEEPSTEP_{command.upper()}_TLS_CERT" in tls[name]["environment"]
    for name in (*COMMANDS, "trainer"):
        assert "KEEPSTEP_TLS_CA" in tls[name]["environment"]
        assert "http://" not in str(SERVICES[name]), "an address whose scheme cannot be changed"
