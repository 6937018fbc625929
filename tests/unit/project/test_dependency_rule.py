"""Imports that import-linter cannot see (docs/dependencies.md): packages work without torch, and import late."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "keepstep_mesh",
    "keepstep",
    "keepstep_history",
    "keepstep_cli",
    "keepstep_lighthouse",
    "keepstep_relay",
    "keepstep_metrics",
}


def test_every_package_is_ruled() -> None:
    assert {path.parent.name for top in ("libs", "services") for path in (ROOT / top).glob("*/*.py")} == PACKAGES


def modules_of(package: str) -> list[str]:
    (folder,) = [top / package for top in (ROOT / "libs", ROOT / "services") if (top / package).is_dir()]
    names = []
    extras = {"otlp_export"}  # loaded only with KEEPSTEP_OTEL; needs keepstep[otel]
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        if parts[-1] not in {"__main__", *extras}:
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


NO_TORCH = """
import importlib, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ImportError(f"{name} is not to be imported here")
sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(modules_of("keepstep_mesh"), id="keepstep_mesh"),
        pytest.param(modules_of("keepstep_lighthouse"), id="keepstep_lighthouse"),
        pytest.param(modules_of("keepstep_relay"), id="keepstep_relay"),
        pytest.param(modules_of("keepstep_metrics"), id="keepstep_metrics"),
        pytest.param(modules_of("keepstep_history"), id="keepstep_history"),
        pytest.param(modules_of("keepstep_cli"), id="keepstep_cli"),
        pytest.param(["keepstep", "keepstep.coordination"], id="keepstep.coordination"),
    ],
)
def test_it_works_without_torch(modules: list[str]) -> None:
    command = [sys.executable, "-W", "error", "-c", NO_TORCH, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_help_of_the_command_imports_next_to_nothing() -> None:
    script = "import sys; from keepstep_cli.main import main; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert not loaded & {"torch", "numpy", "aiohttp", "rich", "asyncio", "structlog", "msgpack"}
    assert loaded & PACKAGES == {"keepstep_cli", "keepstep_mesh"}
    of_mesh = {name for name in done.stdout.split() if name.startswith("keepstep_mesh")}
    light = {"keepstep_mesh", "keepstep_mesh.net", "keepstep_mesh.net.backoff"}
    assert of_mesh == light, "these import nothing"
