"""A module under a second name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType


class SameModule(Loader):
    """Loads a module by importing it under its own name.

    Args:
        own_name: of the module.
        loaded: called with the module.
    """

    def __init__(self, own_name: str, loaded: Callable[[ModuleType], None]) -> None:
        self._own_name = own_name
        self._loaded = loaded
        self._own_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:  # noqa: ARG002
        module = importlib.import_module(self._own_name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has set that of the second name
        self._loaded(module)
