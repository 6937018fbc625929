"""Of the libraries, only ``keepstep/relay_client`` knows the URLs of relays."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

LIBS = Path(__file__).resolve().parents[3] / "libs"
URL = re.compile(r"/v1/chunks|/checkpoints\b|(?<!/v1)/(plan|result|commit|abort|layouts?|packs)(\?|$)")
REQUESTS = re.compile(r"\b(link|service|relay|one)\b.*\.(get|read|post|patch|delete)$")


def texts(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield the strings of a module that are no docstrings."""
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node


def urls(text: str) -> list[int]:
    """Return the lines of a module that have a part of a URL of a relay."""
    tree = ast.parse(text)
    found = [one.lineno for one in texts(tree) if URL.search(one.value)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and REQUESTS.search(ast.unparse(node.func)):
            found += [node.lineno for one in node.args if isinstance(one, ast.Constant) and one.value == "checkpoints"]
    return found


def test_a_part_of_a_url_is_found_in_every_form() -> None:
    forms = (
        'ask("GET", f"/v1/chunks/{digest}")',
        'path = f"/v1/jobs/{job}/checkpoints"',
        'ask("POST", f"{path}/plan", body)',
        'put(f"{path}/layout?rank={rank}")',
        'run(one.get("jobs", job, "checkpoints"))',
    )
    assert [urls(form) for form in forms] == [[1]] * len(forms)
    assert not urls('"""``/v1/chunks/DIGEST`` has a chunk."""\nfound = answer.get("checkpoints")')


def test_no_other_module_has_a_url_of_a_relay() -> None:
    modules = [path for path in LIBS.rglob("*.py") if "relay_client" not in path.parts]
    assert len(modules) > 300
    assert {str(path): lines for path in modules if (lines := urls(path.read_text()))} == {}
