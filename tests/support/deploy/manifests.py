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
    """Return the manifests of base and components as they are in the files, without patches."""
    files = sorted([*KUBERNETES.glob("base/*.yaml"), *KUBERNETES.glob("components/*/*.yaml")])
    found = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    return [one for one in found if one["kind"] not in ("Kustomization", "Component")]


def named(manifests: list[Manifest], kind: str) -> dict[str, Manifest]:
    return {one["metadata"]["name"]: one for one in manifests if one["kind"] == kind}


def template(manifest: Manifest) -> Manifest:
    """Return the pod template of a StatefulSet or JobSet."""
    if manifest["kind"] == "JobSet":
        (jobs,) = manifest["spec"]["replicatedJobs"]
        manifest = jobs["template"]
    pod: Manifest = manifest["spec"]["template"]
    return pod


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    return [one for one in manifests if one["kind"] in ("StatefulSet", "JobSet")]


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
