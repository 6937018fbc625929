"""Make docs/parity.md: every public name of torchft beside that of keepstep.

``torchft_names.json`` has the names, methods, and parameters of torchft 0.2.0 and its nightly of 2026-10-26.
"""

from __future__ import annotations

import importlib
import inspect
import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "parity.md"
NAMES: dict[str, dict[str, Any]] = json.loads(PAGE.with_name("torchft_names.json").read_text())

TABLES: dict[str, Any] = runpy.run_path(str(ROOT / "libs" / "keepstep" / "compat" / "finder.py"))
ABSENT: dict[str, dict[str, str]] = {
    module: {name: instead for name in NAMES[module] if (instead := TABLES["MODULES"].get(module, known.get(name)))}
    for module, known in ((module, TABLES["NAMES"].get(module, {})) for module in NAMES)
}
"""Names that keepstep does not have, with what to use instead."""
DIFFERENT = {
    "set_rank_info": "`configure` sets the rank; a handle needs none",
    "abort": "`reason` in place of `errored`",
    "allgather": "`input_tensors`, as in torch",
    "alltoall_base": "`output` and `input`, as in torch",
    "broadcast": "`tensors`, as in torch",
    "report_error": "`error` in place of `e`",
    "report_future_error": "`error` in place of `e`",
    "ProcessGroupWrapper": "no `timeout`: the wrapped group has it",
}
"""Methods, or constructors of classes, that differ, with the difference."""

HEAD = """# torchft's names

Every public name of torchft 0.2.0 and of its nightly of 2026-10-26, by module. `keepstep` has the same name, methods,
and parameters in the module of the same name, unless the table says otherwise.
[Coming from torchft](coming-from-torchft.md) describes what the same names do differently. `make reference` makes this
page.
"""


def differences(module: str, name: str, entry: dict[str, Any]) -> Iterator[str]:
    """Yield the parameters and methods of torchft that keepstep does not have."""
    ours = getattr(importlib.import_module(f"keepstep.{module}"), name)
    for method, parameters in sorted(entry["signatures"].items()):
        function = getattr(ours, method, None) if method else ours
        if function is None:
            yield f"{method}()"
            continue
        try:
            have = inspect.signature(function).parameters
        except (TypeError, ValueError):
            continue
        if any(one.kind is one.VAR_KEYWORD for one in have.values()):
            continue
        missing = [
            one for one in parameters if one not in ("self", "cls") and not one.startswith("*") and one not in have
        ]
        if missing:
            yield f"{method or name}({', '.join(missing)})"


def row(module: str, name: str, entry: dict[str, Any]) -> str:
    """Return a row of the table."""
    releases = ", ".join(entry["in"])
    if (instead := ABSENT.get(module, {}).get(name)) is not None:
        return f"| `{name}` | {releases} | no: {instead} |"
    methods = {one.partition("(")[0] for one in differences(module, name, entry)}
    differing = ", ".join(f"`{name if one == '__init__' else one}`" for one in sorted(methods))
    return f"| `{name}` | {releases} | {f'[differs](#differences) in {differing}' if differing else 'the same'} |"


def parity() -> str:
    """Return the page."""
    parts = [HEAD]
    for module, names in sorted(NAMES.items()):
        parts.append(f"## {module}\n| name | in torchft | in keepstep |\n|---|---|---|")
        parts.extend(row(module, name, entry) for name, entry in sorted(names.items()))
        parts.append("")
    parts.append("## Differences\n| method or constructor | in keepstep |\n|---|---|")
    parts.extend(f"| `{name}` | {difference} |" for name, difference in sorted(DIFFERENT.items()))
    parts.append("")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(parity())
