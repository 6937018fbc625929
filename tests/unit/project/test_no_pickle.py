"""Nothing that comes over the network is ever unpickled, because nothing in the packages can."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = sorted(path for part in ("libs", "services") for path in (ROOT / part).iterdir() if path.is_dir())
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
FORBIDDEN_CALLS = {
    "torch.save",
    "torch.load",
    "np.load",
    "numpy.load",
    "broadcast_object_list",
    "all_gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
LAST_NAMES = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}
ALLOWED = {
    # Files of torch.save, which `keepstep checkpoint import` reads with `weights_only`, and their error.
    "libs/keepstep_formats/pickled_items.py": {"pickle", "torch.load", "torch.save"},
    # Checkpoints of Lightning are files of torch.save; loading needs `weights_only`.
    "libs/keepstep/integrations/lightning/relay_checkpoints.py": {"torch.load", "torch.save"},
    # The names of opcodes, to write what torch reads.
    "services/keepstep_relay/torch_view/pickle_writer.py": {"pickle"},
}


def uses(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            if name in LAST_NAMES:  # to write a call as source takes most of the time
                yield from (name, ast.unparse(node.func))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: path.name)
def test_a_package_has_no_use_of_pickle(package):
    found = {}
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if used := set(uses(ast.parse(path.read_text()))) & (FORBIDDEN_MODULES | FORBIDDEN_CALLS) - ALLOWED.get(
            name, set()
        ):
            found[name] = used
    assert not found


def test_the_look_for_pickle_sees_it():
    source = "import pickle\nfrom torch import load\nimport torch\nx = torch.load('f')\ndist.all_gather_object(a, b)\n"
    assert set(uses(ast.parse(source))) >= {"pickle", "torch.load", "all_gather_object"}
