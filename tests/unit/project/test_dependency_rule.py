"""Imports that import-linter cannot see (docs/dependencies.md): packages work without torch, and import late."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Import:
    where: str
    """Path below libs/ or services/."""
    package: str
    """Of the importing file."""
    imported: str
    """Top-level package."""
    lazy: bool
    """Inside a function."""
    line: int

    def __str__(self) -> str:
        return f"{self.where}:{self.line} imports {self.imported}"


def imports_of(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(top-level package, inside a function, line) of every import that happens at run time."""

    def visit(node: ast.AST, lazy: bool) -> Iterator[tuple[str, bool, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield alias.name.partition(".")[0], lazy, child.lineno
            elif isinstance(child, ast.ImportFrom) and child.module and child.level == 0:
                yield child.module.partition(".")[0], lazy, child.lineno
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, lazy or inside)

    yield from visit(ast.parse(path.read_text()), lazy=False)


def all_imports() -> list[Import]:
    return [
        Import(str(path.relative_to(top)), path.relative_to(top).parts[0], imported, lazy, line)
        for top in (ROOT / "libs", ROOT / "services")
        for path in sorted(top.rglob("*.py"))
        for imported, lazy, line in imports_of(path)
    ]


def test_every_package_is_ruled() -> None:
    assert {one.package for one in all_imports()} == PACKAGES


def test_nothing_is_pickled() -> None:
    pickles = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
    allowed = (
        "keepstep/checkpoint/foreign/pickled_items.py",  # needs the error of torch.load(weights_only=True)
        "keepstep_relay/torch_view/pickle_writer.py",  # needs the opcodes
    )
    assert not [str(one) for one in all_imports() if one.imported in pickles and one.where not in allowed]


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
