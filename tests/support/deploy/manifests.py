"""The manifests of deploy/kubernetes as Python values."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import yaml

KUBERNETES = Path(__file__).resolve().parents[3] / "deploy" / "kubernetes"
OVERLAYS = sorted(one.parent.name for one in KUBERNETES.glob("overlays/*/kustomization.yaml"))
NAME = "app.kubernetes.io/name"
Manifest = dict[str, Any]


def render_command() -> list[str] | None:
    """Return the command that renders an overlay; None: neither kustomize nor kubectl is installed."""
    if found := shutil.which("kustomize"):
        return [found, "build"]
    return [found, "kustomize"] if (found := shutil.which("kubectl")) else None


@cache
def rendered(overlay: str) -> list[Manifest]:
    command = render_command()
    assert command is not None
    folder = KUBERNETES / "overlays" / overlay
    done = subprocess.run([*command, str(folder)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@cache
def written() -> list[Manifest]:
    """Return the manifests of base, components and groups as they are in the files, without patches; group 3."""
    files = sorted([*KUBERNETES.glob("base/*.yaml"), *KUBERNETES.glob("components/*/*.yaml")])
    found = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    of_groups = [one for file in sorted(KUBERNETES.glob("groups/*.yaml")) for one in of_group(file, 3)]
    return [one for one in found if one["kind"] not in ("Kustomization", "Component")] + of_groups


def of_group(file: Path, group: int) -> list[Manifest]:
    """Return the manifests of a file of ``groups``, as the command at its top makes them."""
    return list(yaml.safe_load_all(file.read_text().replace("NUMBER", str(group))))


def named(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def template(manifest: Manifest) -> Manifest:
    """Return the pod template of a StatefulSet, JobSet, or TrainingRuntime."""
    pod: Manifest = (manifest if manifest["kind"] == "StatefulSet" else job_of(manifest))["spec"]["template"]
    return pod


def job_of(manifest: Manifest) -> Manifest:
    """Return the Job of a JobSet or TrainingRuntime, as Kubernetes gets it."""
    job_set = manifest["spec"]["template"] if manifest["kind"] == "TrainingRuntime" else manifest
    (jobs,) = job_set["spec"]["replicatedJobs"]
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "group"}, **jobs["template"]}


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in ("StatefulSet", "JobSet", "TrainingRuntime")]


def container(manifest: Manifest) -> Manifest:
    (only,) = template(manifest)["spec"]["containers"]
    found: Manifest = only
    return found


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Whether a label selector of Kubernetes matches ``labels``."""
    by_labels = all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())
    rules = selector.get("matchExpressions", [])
    assert all(rule["operator"] == "In" for rule in rules)
    return by_labels and all(labels.get(rule["key"]) in rule["values"] for rule in rules)
