"""The import hook that finds ``megatron.core.dist_checkpointing`` and its modules in ``keepstep.sharded``."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from keepstep.compat.same_module import SameModule

PACKAGE = "megatron.core.dist_checkpointing"
PARENTS = ("megatron", "megatron.core")


class MegatronFinder(MetaPathFinder):
    """Finds ``megatron.core.dist_checkpointing.NAME`` where ``keepstep.sharded.NAME`` is.

    Other modules of Megatron Core are those that are installed. If it is not, its packages are empty.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname in PARENTS:
            installed = PathFinder.find_spec(fullname, path)
            return None if installed is not None else ModuleSpec(fullname, None, is_package=True)
        if fullname != PACKAGE and not fullname.startswith(f"{PACKAGE}."):
            return None
        name = fullname.removeprefix(PACKAGE)
        own = importlib.util.find_spec(f"keepstep.sharded{name}")
        if own is None:
            raise ModuleNotFoundError(
                f"keepstep, which stands in for {PACKAGE}, has no module {name.removeprefix('.')!r}: docs/sharded.md "
                f"lists what differs",
                name=fullname,
            )
        spec = ModuleSpec(fullname, SameModule(f"keepstep.sharded{name}", _save_as_megatron), origin=own.origin)
        spec.submodule_search_locations = own.submodule_search_locations
        return spec


def _save_as_megatron(module: ModuleType) -> None:
    """Let saves that name no format write the one that Megatron Core reads."""
    if module.__name__ == "keepstep.sharded":
        module.strategies.set_default_backend("torch_dist")
