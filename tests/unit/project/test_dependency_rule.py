"""Rules that import-linter cannot see (docs/dependencies.md): file names, rooms, packages without torch."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = {
    "keepstep_mesh",
    "keepstep",
    "keepstep_chaos",
    "keepstep_cli",
    "keepstep_formats",
    "keepstep_megatron",
    "keepstep_lighthouse",
    "keepstep_relay",
    "keepstep_metrics",
}
MOST_FILES = 14
ROOMS_OF_WINGS = {
    "keepstep_chaos": {"keepstep_cli.asking", "keepstep_cli.errors", "keepstep_cli.running"},
    "keepstep_formats": {"keepstep.checkpoint", "keepstep.state"},
    "keepstep_megatron": {"keepstep.checkpoint", "keepstep.connection", "keepstep.state", "keepstep_formats"},
}
"""Rooms that a wing imports, except those of the mesh. No other package imports a wing (pyproject.toml)."""


def test_every_package_is_ruled() -> None:
    assert {path.parent.name for top in ("libs", "services") for path in (ROOT / top).glob("*/*.py")} == PACKAGES


def folder_of(package: str) -> Path:
    (folder,) = [top / package for top in (ROOT / "libs", ROOT / "services") if (top / package).is_dir()]
    return folder


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_no_file_name_occurs_twice_in_a_package(package: str) -> None:
    names = Counter(path.name for path in folder_of(package).rglob("*.py") if not path.name.startswith("__"))
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_room_says_what_it_is_for_and_stays_small(package: str) -> None:
    for room in [path.parent for path in folder_of(package).rglob("__init__.py")]:
        assert (room / "__init__.py").read_text().startswith('"""'), room
        assert len([path for path in room.glob("*.py") if not path.name.startswith("__")]) <= MOST_FILES, room


def modules_of(package: str) -> list[str]:
    folder = folder_of(package)
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
        pytest.param(modules_of("keepstep_chaos"), id="keepstep_chaos"),
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


def test_the_public_names_load_no_other_package_but_the_mesh() -> None:
    script = "import sys; from keepstep import *; import keepstep.checkpoint; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & PACKAGES == {"keepstep", "keepstep_mesh"}


@pytest.mark.parametrize("wing", sorted(ROOMS_OF_WINGS))
def test_a_wing_imports_only_these_rooms(wing: str) -> None:
    graph = grimp.build_graph(*sorted(PACKAGES))
    modules = {wing, *graph.find_descendants(wing)}
    imported = {name for one in modules for name in graph.find_modules_directly_imported_by(one)} - modules
    parts = [name.split(".") for name in imported if not name.startswith("keepstep_mesh.")]
    rooms = {".".join(part[:1] if part[0] in ROOMS_OF_WINGS else part[:2]) for part in parts}
    assert rooms == ROOMS_OF_WINGS[wing]
