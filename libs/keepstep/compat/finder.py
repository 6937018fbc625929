"""The import hook that finds ``torchft`` and its modules in keepstep."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from keepstep.compat import absent


class TorchftFinder(MetaPathFinder):
    """Finds ``torchft.NAME`` where ``keepstep.NAME`` is."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "torchft":
            return None
        own = importlib.util.find_spec(f"keepstep.{name}" if name else "keepstep")
        if own is None:
            raise ModuleNotFoundError(absent.of_module(name), name=fullname)
        spec = ModuleSpec(fullname, _SameModule(own.name, name), origin=own.origin)
        spec.submodule_search_locations = own.submodule_search_locations
        return spec


class _SameModule(Loader):
    """Loads a module by importing it under its own name.

    Args:
        own_name: of the module.
        name: the same without the package.
    """

    def __init__(self, own_name: str, name: str) -> None:
        self._own_name = own_name
        self._name = name
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        module = importlib.import_module(self._own_name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has set that of torchft
        if not self._name:
            log_variables()
        if self._name in absent.NAMES:
            vars(module).setdefault("__getattr__", partial(_refuse, self._name))


def _refuse(module: str, name: str) -> NoReturn:
    """Raise an ImportError for a name that only torchft has: it is all that ``from ... import ...`` shows."""
    if (reason := absent.of_name(module, name)) is not None:
        raise ImportError(reason, name=f"torchft.{module}")
    raise AttributeError(f"module 'keepstep.{module}' has no attribute {name!r}")


def log_variables() -> None:
    """Log each environment variable of torchft that is set and has no effect."""
    from keepstep_mesh.config.logging import get_logger  # noqa: PLC0415  the finder is there within milliseconds

    log = get_logger("keepstep.compat")
    for name, reason in absent.VARIABLES.items():
        if os.environ.get(name):
            log.warning("variable of torchft has no effect", variable=name, reason=reason)
