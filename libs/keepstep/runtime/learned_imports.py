"""Tell ``keepstep run`` what this process has imported, so that it starts later ones with these imports done."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from importlib.machinery import BuiltinImporter, ExtensionFileLoader, FrozenImporter, SourceFileLoader
from pathlib import Path
from typing import Any

FOLDER_ENV = "KEEPSTEP_IMPORTS"
PIPE = "learned"
"""Name of the pipe in the folder that gets the name of each new file."""
LOADERS = (SourceFileLoader, ExtensionFileLoader)
AT_START = "keepstep_at_start"
"""Attribute of ``os.environ`` in a warm start: the environment of the start."""
STEPS = 2
"""The first call of an optimizer, which may import, comes after the first commit."""
_commits = 0


def tell_imports() -> None:
    """Write the modules of this process for the launcher, once. Call it after each commit.

    Only rank 0 of a group does, and only under ``keepstep run``.
    """
    global _commits
    if _commits == STEPS:
        return
    _commits += 1
    folder = os.environ.get(FOLDER_ENV)
    if _commits < STEPS or not folder or os.environ.get("RANK", "0") != "0":
        return
    name = f"{os.getpid()}.json"
    with contextlib.suppress(OSError):  # without it, later starts take their time as this one did
        Path(folder, name).write_text(json.dumps(_imports()))
        pipe = os.open(Path(folder, PIPE), os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{name}\n".encode())
        finally:
            os.close(pipe)


def _imports() -> dict[str, Any]:
    modules = dict(sys.modules)
    at_start: dict[str, str] = vars(os.environ).get(AT_START) or dict(
        one.decode(errors="surrogateescape").split("=", 1)
        for one in Path("/proc/self/environ").read_bytes().split(b"\0")
        if b"=" in one
    )
    names = at_start.keys() | os.environ.keys()
    return {
        "modules": [
            [name, spec.origin] for name, one in modules.items() if (spec := _importable(name, one)) is not None
        ],
        "names": list(modules),
        "variables": [name for name in names if at_start.get(name) != os.environ.get(name)],
    }


def _importable(name: str, module: Any) -> Any:
    """Return the spec of a module that an import of its name gives again, else None."""
    spec = getattr(module, "__spec__", None)
    if spec is None or spec.name != name or not isinstance(spec.origin, str):
        return None
    usual = isinstance(spec.loader, LOADERS) or spec.loader in (BuiltinImporter, FrozenImporter)
    return spec if usual else None
