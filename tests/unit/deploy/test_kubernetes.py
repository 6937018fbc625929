"""The manifests of deploy/kubernetes agree with the code and with each other. No cluster is needed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from keepstep_cli.main import main
from keepstep_cli.running.supervisor_events import Restarts
from keepstep_lighthouse.settings import LighthouseSettings
from keepstep_mesh.config import variables
from keepstep_mesh.exit_codes import ENDS_THE_SAME
from keepstep_mesh.serving.service import STOP_SECONDS, Service, all_routes
from keepstep_metrics.settings import MetricsSettings
from keepstep_relay.settings import RelaySettings
from tests.support.deploy.manifests import (
    KUBERNETES,
    NAME,
    OVERLAYS,
    Manifest,
    container,
    named,
    render_command,
    rendered,
    selects,
    template,
    workloads,
    written,
)

ROOT = KUBERNETES.parents[1]
SERVICES = {"lighthouse": LighthouseSettings().bind, "relay": RelaySettings().bind, "metrics": MetricsSettings().bind}
"""Their default addresses."""
MANIFESTS = written()
FROM_FILES = {f"{one['kind']} {one['metadata']['name']}": one for one in workloads(MANIFESTS)}
TRAINERS = [name for name in FROM_FILES if name.endswith(" trainer")]
SETTINGS = named(MANIFESTS, "ConfigMap")["keepstep"]["data"]
SECRETS = {"keepstep-tokens": "tokens", "keepstep-worker-token": "token", "keepstep-service-token": "token"}
"""Secrets that the operator creates, with the key of each."""
needs_renderer = pytest.mark.skipif(
    render_command() is None, reason="neither kustomize nor kubectl is installed (kubectl has `kubectl kustomize`)"
)


def words(workload: Manifest) -> list[str]:
    """The command line, with values for its variables."""
    of_it = container(workload)
    values = {"POD": "lighthouse-0", "REPLICA_GROUP_ID": "3", **SETTINGS}
    args: list[str] = [*of_it.get("command", ["keepstep"]), *of_it.get("args", [])]
    return [re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word) for word in args]


def environment(workload: Manifest) -> dict[str, Any]:
    """The variables of a container; those with a source have the source as their value."""
    own = {one["name"]: one.get("value", one.get("valueFrom")) for one in container(workload).get("env", [])}
    return {**(SETTINGS if "envFrom" in container(workload) else {}), **own}


def expanded(workload: Manifest) -> set[str]:
    """The variables that Kubernetes puts into the command line."""
    return set(re.findall(r"\$\((\w+)\)", str(container(workload).get("args"))))


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


@pytest.mark.parametrize("name", FROM_FILES)
def test_every_pod_is_restricted_and_has_limits(name: str) -> None:
    pod, only = template(FROM_FILES[name])["spec"], container(FROM_FILES[name])
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 10001, "the user of deploy/Dockerfile"
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert only["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} <= set(only["resources"]["requests"])
    assert "memory" in only["resources"]["limits"]


@pytest.mark.parametrize("name", [name for name in FROM_FILES if not name.endswith(" etcd")])
def test_every_flag_and_value_is_one_that_the_command_takes(name: str) -> None:
    _, command, *given = words(FROM_FILES[name])
    given = [word for word in given if not word.startswith("--token-file")]  # the file is not there
    flags = given[: given.index("--")] if "--" in given else given
    with main.all_commands()[command].make_context(command, list(given)) as context:
        assert len([value for value in context.params.values() if value is not None]) >= len(flags)


@pytest.mark.parametrize("name", FROM_FILES)
def test_every_variable_is_one_that_the_code_reads_or_the_command_line_names(name: str) -> None:
    known = {*variables.OF_CLIENTS, *variables.OF_TRAINERS, *variables.OF_LAUNCHERS, *variables.OF_SERVICES}
    assert expanded(FROM_FILES[name]) <= set(environment(FROM_FILES[name]))
    in_commands = set().union(*map(expanded, FROM_FILES.values()))
    assert not [one for one in environment(FROM_FILES[name]) if one not in known | in_commands]


def test_the_variables_of_the_tls_component_are_flags_of_the_services() -> None:
    text = (KUBERNETES / "components" / "tls" / "kustomization.yaml").read_text()
    found = set(re.findall(r"KEEPSTEP_\w+", text)) - set(variables.OF_CLIENTS)
    known = {f"KEEPSTEP_{name}_{flag.name}".upper() for name in SERVICES for flag in main.all_commands()[name].params}
    assert len(found) == 2 * len(SERVICES)
    assert found <= known


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_listens_on_its_default_port_and_its_address_names_it(service: str) -> None:
    port = port_of(SERVICES[service])
    workload = FROM_FILES[f"StatefulSet {service}"]
    own = named(MANIFESTS, "Service")[service]
    assert f"--bind=0.0.0.0:{port}" in words(workload)
    assert container(workload)["ports"] == [{"name": "http", "containerPort": port}]
    assert own["spec"]["ports"] == [{"name": "http", "port": port}]
    (advertised,) = [word for word in container(workload)["args"] if word.startswith("--advertise=")]
    host = f"{service}:" if "clusterIP" not in own["spec"] else f"$(POD).{service}:"
    assert advertised == f"--advertise=$(SCHEME)://{host}{port}"


@pytest.mark.parametrize("service", SERVICES)
def test_the_probes_ask_open_routes(service: str) -> None:
    routes = {one.path for one in all_routes(Service(service, ())) if one.access.name == "OPEN"}
    of_it = container(FROM_FILES[f"StatefulSet {service}"])
    assert of_it["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert of_it["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert {"/readyz", "/healthz"} <= routes


def test_clients_know_every_lighthouse() -> None:
    replicas = FROM_FILES["StatefulSet lighthouse"]["spec"]["replicas"]
    port = port_of(SERVICES["lighthouse"])
    expected = [f"http://lighthouse-{number}.lighthouse:{port}" for number in range(replicas)]
    assert SETTINGS["KEEPSTEP_LIGHTHOUSE"].split(",") == expected


@pytest.mark.parametrize("name", FROM_FILES)
def test_a_pod_may_take_longer_to_stop_than_its_process(name: str) -> None:
    limit = STOP_SECONDS
    if name in TRAINERS:
        command = main.all_commands()["run"]
        with command.make_context("run", words(FROM_FILES[name])[2:]) as context:
            limit = context.params["grace"] + context.params["notice"]
        assert limit >= Restarts().grace
    assert template(FROM_FILES[name])["spec"]["terminationGracePeriodSeconds"] > limit + 10


def test_every_service_and_disruption_budget_selects_the_pods_of_its_name() -> None:
    pods = {name: template(one)["metadata"]["labels"] for name, one in FROM_FILES.items()}
    for name, service in named(MANIFESTS, "Service").items():
        assert service["metadata"]["labels"] == service["spec"]["selector"] == {NAME: name}
        assert f"StatefulSet {name}" in pods
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for name, one in named(MANIFESTS, kind).items():
            selector = one["spec"].get("selector") or one["spec"]["podSelector"]
            matched = {pod.split()[1] for pod, labels in pods.items() if selects(selector, labels)}
            assert matched == {name}
    for name, workload in FROM_FILES.items():
        if name.startswith("StatefulSet"):
            assert selects(workload["spec"]["selector"], pods[name])
            assert workload["spec"]["serviceName"] in named(MANIFESTS, "Service")


MAY_CONNECT = {
    "lighthouse": {"lighthouse", "relay", "metrics", "trainer", "monitoring"},
    "relay": {"relay", "metrics", "trainer", "monitoring"},
    "metrics": {"lighthouse", "relay", "trainer", "monitoring"},
    "trainer": {"lighthouse"},
    "etcd": {"lighthouse"},
}
"""By server: the clients that may connect to its port."""


@pytest.mark.parametrize("server", MAY_CONNECT)
def test_a_network_policy_opens_the_port_of_the_service_to_its_clients_only(server: str) -> None:
    policy = named(MANIFESTS, "NetworkPolicy")[server]["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    (rule,) = [one for one in policy["ingress"] if "ports" in one]
    (port,) = named(MANIFESTS, "Service")[server]["spec"]["ports"]
    assert rule["ports"] == [{"port": port["port"]}]
    assert port["port"] in [one["containerPort"] for one in container(FROM_FILES[f"StatefulSet {server}"])["ports"]]
    clients = {
        name.split()[1]
        for name, one in FROM_FILES.items()
        for source in rule["from"]
        if selects(source.get("podSelector", {"matchLabels": {NAME: "-"}}), template(one)["metadata"]["labels"])
    }
    namespaces = [one["namespaceSelector"]["matchLabels"] for one in rule["from"] if "namespaceSelector" in one]
    clients |= {one["kubernetes.io/metadata.name"] for one in namespaces}
    assert clients == MAY_CONNECT[server]
    free = [one["from"] for one in policy["ingress"] if "ports" not in one]
    own = {"podSelector": {"matchLabels": {NAME: "trainer"}}}
    assert free == ([[own]] if server == "trainer" else []), "gradients and live state use free ports"


@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_are_as_many_as_the_job_has_groups_and_one_at_a_time_may_be_evicted(name: str) -> None:
    workload = FROM_FILES[name]
    jobs = workload["kind"] == "JobSet"
    count = workload["spec"]["replicatedJobs"][0]["replicas"] if jobs else workload["spec"]["replicas"]
    assert f"--replicas-in-job={count}" in words(workload)
    folder = KUBERNETES / "components" / workload["kind"].lower()
    budget = re.search(r"^  (m\w+): (\d+)", (folder / "trainer.yaml").read_text(), re.MULTILINE)
    assert budget is not None
    assert budget.groups() == (("minAvailable", str(count - 1)) if jobs else ("maxUnavailable", "1"))


def test_both_kinds_of_trainers_have_the_same_pod() -> None:
    of_set, of_jobs = (template(FROM_FILES[name])["spec"] for name in sorted(TRAINERS, reverse=True))
    labels = [pod["containers"][0]["env"].pop(0)["valueFrom"]["fieldRef"]["fieldPath"] for pod in (of_set, of_jobs)]
    assert labels == [
        "metadata.labels['apps.kubernetes.io/pod-index']",
        "metadata.labels['jobset.sigs.k8s.io/job-index']",
    ]
    assert of_jobs.pop("restartPolicy") == "Never"
    assert of_set == of_jobs


def test_a_job_is_not_started_again_after_a_code_that_would_come_again() -> None:
    (group,) = FROM_FILES["JobSet trainer"]["spec"]["replicatedJobs"]
    (rule,) = group["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert set(rule["onExitCodes"]["values"]) >= ENDS_THE_SAME
    assert rule["onExitCodes"]["containerName"] == container(FROM_FILES["JobSet trainer"])["name"]


@pytest.mark.parametrize("name", TRAINERS)
def test_the_group_server_listens_where_lighthouses_may_connect_and_the_script_exists(name: str) -> None:
    workload = FROM_FILES[name]
    (port,) = container(workload)["ports"]
    assert environment(workload)["KEEPSTEP_MANAGER_PORT"] == str(port["containerPort"])
    for file in re.findall(r"/opt/keepstep/(\S+\.py)", str(container(workload))):
        assert (ROOT / file).is_file(), file
    script = next(word for word in words(workload) if word.endswith("train_ddp.py"))
    assert 'add_argument("--steps"' in (ROOT / "examples" / Path(script).name).read_text()


def secrets_of(workload: Manifest) -> set[str]:
    return {one["secret"]["secretName"] for one in template(workload)["spec"].get("volumes", []) if "secret" in one}


def test_only_services_see_the_tokens_of_all_roles_and_no_file_has_a_secret() -> None:
    assert not named(MANIFESTS, "Secret")
    assert {name for name, one in FROM_FILES.items() if "keepstep-tokens" in secrets_of(one)} == {
        f"StatefulSet {service}" for service in SERVICES
    }
    for name in TRAINERS:
        assert secrets_of(FROM_FILES[name]) == {"keepstep-worker-token", "keepstep-ca"}
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    for secret, key in SECRETS.items():
        assert re.search(rf"secret generic {secret} --from-file={key}\b", page), f"{secret} is not explained"


@needs_renderer
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_renders_with_everything_in_its_namespace_and_every_name_defined(overlay: str) -> None:
    manifests = rendered(overlay)
    (namespace,) = named(manifests, "Namespace")
    outside = [one for one in manifests if one["metadata"].get("namespace") != namespace]
    assert [one["kind"] for one in outside] == ["Namespace"]
    created = {one["spec"]["secretName"] for one in named(manifests, "Certificate").values()}
    for one in workloads(manifests):
        required = {v["secret"]["secretName"] for v in template(one)["spec"].get("volumes", []) if required_secret(v)}
        assert required <= created | set(SECRETS)
        mounts, volumes = container(one)["volumeMounts"], template(one)["spec"].get("volumes", [])
        claims = one["spec"].get("volumeClaimTemplates", [])
        assert {m["name"] for m in mounts} == {v["name"] for v in volumes} | {c["metadata"]["name"] for c in claims}
        for source in container(one).get("envFrom", []):
            assert source["configMapRef"]["name"] in named(manifests, "ConfigMap")


def required_secret(volume: Manifest) -> bool:
    return "secret" in volume and not volume["secret"].get("optional")


@needs_renderer
def test_production_speaks_tls_only_and_every_address_is_in_a_certificate() -> None:
    manifests = rendered("production")
    settings = named(manifests, "ConfigMap")["keepstep"]["data"]
    assert settings["SCHEME"] == "https"
    assert "http:" not in str(settings)
    hosts = {re.sub(r"https://(.*):\d+", r"\1", one) for one in settings["KEEPSTEP_LIGHTHOUSE"].split(",")}
    certificates = {name: set(one["spec"].get("dnsNames", ())) for name, one in named(manifests, "Certificate").items()}
    assert hosts <= certificates["lighthouse"]
    for service in SERVICES:
        workload = named(manifests, "StatefulSet")[service]
        headless = "clusterIP" in named(manifests, "Service")[service]["spec"]
        pods = {f"{service}-{number}.{service}" for number in range(workload["spec"]["replicas"])}
        assert certificates[service] == {"keepstep"} | (pods if headless else {service})
        for probe in ("readinessProbe", "livenessProbe"):
            assert container(workload)[probe]["httpGet"]["scheme"] == "HTTPS"
        names = {one["name"]: one.get("value") for one in container(workload)["env"]}
        files = {f"/etc/keepstep/tls/tls.{part}" for part in ("crt", "key")}
        assert {names[f"KEEPSTEP_{service.upper()}_TLS_{part}"] for part in ("CERT", "KEY")} == files
        assert container(workload)["args"] == container(FROM_FILES[f"StatefulSet {service}"])["args"]
    (endpoint,) = named(manifests, "ServiceMonitor")["keepstep"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]["serverName"]) == ("https", "keepstep")


@needs_renderer
def test_prometheus_asks_the_metrics_of_every_service_with_a_token() -> None:
    manifests = rendered("production")
    monitor = named(manifests, "ServiceMonitor")["keepstep"]["spec"]
    asked = {
        n for n, one in named(manifests, "Service").items() if selects(monitor["selector"], one["metadata"]["labels"])
    }
    assert asked == set(SERVICES)
    (endpoint,) = monitor["endpoints"]
    assert endpoint["authorization"]["credentials"]["name"] in SECRETS
    assert endpoint["path"] in {one.path for one in all_routes(Service("any", ()))}


@needs_renderer
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_accepts_every_manifest(overlay: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    manifests = [built_in(one) for one in rendered(overlay) if built_in(one)]
    assert len(manifests) > 10
    for one in manifests:
        validate(one, "1.32", strict=True)


def built_in(manifest: Manifest) -> Manifest | None:
    """Return a manifest whose schema Kubernetes has: the Job of a JobSet, and None for those of other operators."""
    if manifest["kind"] == "JobSet":
        (jobs,) = manifest["spec"]["replicatedJobs"]
        return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "group"}, **jobs["template"]}
    group = manifest["apiVersion"].partition("/")[0]
    return manifest if "." not in group or group.endswith(".k8s.io") else None
