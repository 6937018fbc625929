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

FRAGMENT_LINES = 60
FRAGMENTS = {
    "keepstep": {
        *("core", "dict_utils", "mapping", "optimizer", "prefixes"),  # public
        *("exchange_utils", "serialization", "state_dict_utils", "tensor_aware_state_dict", "validation"),  # public
        *("quantized", "two_bit", "padding"),  # public
        *("retry_rules", "scalars"),  # pure
        *("callback_state", "module_layout"),
        *("neutral_elements", "unread_output"),
    },
    "keepstep_chaos": {"pace"},  # pure
    "keepstep_cli": {
        *("completion", "doctor_command", "metrics_command", "restart"),  # one file for each command
        *("too_few", "watching"),
    },
    "keepstep_lighthouse": {"repeated_frames", "service_handlers", "welcomed"},
    "keepstep_megatron": {"nonpersistent"},  # public
    "keepstep_mesh": {"certificate_end", "clock_offset"},
    "keepstep_metrics": {"commits", "lost_steps", "pace"},  # pure
    "keepstep_relay": {"eviction", "kept_directories", "locks"},
}
"""Shorter modules that one module imports. Others are a part of their importer: the list may only shrink."""


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


def test_the_folders_of_the_unit_tests_are_rooms_of_the_product() -> None:
    unit = ROOT / "tests" / "unit"
    others = {unit / one for one in ("project", "support", "deploy")}  # the repository, the tests' own tools, its files
    rooms = {path.parent for path in unit.rglob("test_*.py")} - others
    assert len(rooms) >= 30
    paths = [room.relative_to(unit) for room in rooms]
    assert [str(one) for one in paths if not any((ROOT / top / one).is_dir() for top in ("libs", "services"))] == []
    names = Counter(path.name for path in unit.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


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
    assert not loaded & {"torch", "numpy", "aiohttp", "rich", "asyncio", "msgpack"}
    assert loaded & PACKAGES == {"keepstep_cli", "keepstep_mesh"}
    of_mesh = {name for name in done.stdout.split() if name.startswith("keepstep_mesh")}
    light = {"keepstep_mesh", "keepstep_mesh.net", "keepstep_mesh.net.backoff"} | {
        "keepstep_mesh.protocol",
        "keepstep_mesh.protocol.policy",
        "keepstep_mesh.text",
    }
    assert of_mesh == light, "these import nothing"


def test_the_public_names_load_no_other_package_but_the_mesh() -> None:
    script = "import sys; from keepstep import *; import keepstep.checkpoint; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert {name.partition(".")[0] for name in done.stdout.split()} & PACKAGES == {"keepstep", "keepstep_mesh"}


def newly_loaded(script: str) -> set[str]:
    """Return the modules that a fresh process loads for ``script``, after torch if that is there."""
    around = f"import sys; before = set(sys.modules); {script}; print(*(set(sys.modules) - before))"
    command = [sys.executable, "-u", "-c", around]  # a flag: not forked from a process that has loaded more
    return set(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split())


def test_an_import_of_the_public_names_loads_nothing_that_takes_long_beside_torch() -> None:
    loaded = newly_loaded("import torch; before = set(sys.modules); from keepstep import *")
    slow = ("aiohttp", "grpc", "numpy.testing", "opentelemetry", "pygments", "rich", "scipy", "tensorboard", "triton")
    of_torch = ("torch.export", "torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.onnx")
    own = ("keepstep.checkpoint.", "keepstep.group.group_server", "keepstep.sharded", "keepstep.integrations")
    assert "keepstep.manager" in loaded
    assert not [one for one in loaded if one.startswith((*slow, *of_torch, *own))]


def test_a_checkpoint_in_a_directory_loads_no_http_client(tmp_path: Path) -> None:
    script = """
import sys, torch
from keepstep import checkpoint
checkpoint.save({"w": torch.ones(3)}, sys.argv[1])
checkpoint.load({"w": torch.zeros(3)}, sys.argv[1])
print(*sys.modules)
"""
    command = [sys.executable, "-u", "-c", script, str(tmp_path / "one")]  # -u: not forked, with all modules loaded
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    clients = {"aiohttp", "keepstep.connection.http_connection", "keepstep.relay_client.relay_link"}
    assert not set(done.stdout.split()) & clients


def test_the_names_of_megatron_do_not_load_torchs_own_checkpoints() -> None:
    script = "import sys; import keepstep.sharded; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.split()
    assert "keepstep_megatron.strategies.torch_dist" in loaded
    assert "torch.distributed.checkpoint" not in loaded, "it takes as long to import as torch"


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*sorted(PACKAGES))


@pytest.mark.parametrize("wing", sorted(ROOMS_OF_WINGS))
def test_a_wing_imports_only_these_rooms(wing: str, graph: grimp.ImportGraph) -> None:
    modules = {wing, *graph.find_descendants(wing)}
    imported = {name for one in modules for name in graph.find_modules_directly_imported_by(one)} - modules
    parts = [name.split(".") for name in imported if not name.startswith("keepstep_mesh.")]
    rooms = {".".join(part[:1] if part[0] in ROOMS_OF_WINGS else part[:2]) for part in parts}
    assert rooms == ROOMS_OF_WINGS[wing]


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_short_module_with_one_importer_is_part_of_it(package: str, graph: grimp.ImportGraph) -> None:
    found = set()
    for name in {*modules_of(package)} & graph.modules:
        path = folder_of(package).parent.joinpath(*name.split(".")).with_suffix(".py")
        alone = len(graph.find_modules_that_directly_import(name)) == 1
        if alone and path.exists() and len(path.read_text().splitlines()) < FRAGMENT_LINES:
            found.add(path.stem)
    listed = FRAGMENTS.get(package, set())
    assert not found - listed, "join it with its importer"
    assert not listed - found, "it is joined or imported elsewhere too: remove it from the list"
