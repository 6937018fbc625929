"""The import hooks that find modules of torchft and Megatron Core in keepstep, and what keepstep does not have."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import NoReturn

ALIASES = {"_torchft": "coordination"}
"""Modules of torchft, and the module of keepstep that has their names."""

MODULES = {
    "otel": "KEEPSTEP_OTEL exports spans and logs, see docs/telemetry.md",
    "torchcomms": "use a process group of keepstep.process_group",
    "utils": "torch.accelerator has streams and synchronize for every device",
}
"""Modules of torchft."""

NAMES = {
    "coordination": {
        "Timestamp": "Quorum.created is a number, in seconds of Unix time",
        "lighthouse_main": "run the command `keepstep lighthouse`",
    },
    "manager": {
        "ExceptionWithTraceback": "Manager.errored() returns the exception itself",
        "extract_trailing_digits": "read the number of the group from the variable REPLICA_GROUP_ID",
        "get_timeout": "the Manager itself reads its limits from the environment",
    },
    "process_group": {
        "trigger_nccl_fr_trace_through_pipe": "write to the pipe that TORCH_NCCL_DEBUG_INFO_PIPE_FILE names",
    },
}
"""Names of torchft, by the module that has them."""

VARIABLES = {
    "TORCHFT_OTEL_RESOURCE_ATTRIBUTES_JSON": "KEEPSTEP_OTEL exports spans and logs, see docs/telemetry.md",
    "TORCHFT_TRIGGER_FR_ON_ABORT": "keepstep does not ask NCCL's flight recorder for a trace",
    "TORCHFT_USE_BUCKETIZATION": "pass use_bucketization=True to DiLoCo",
    "TORCHFT_USE_OTEL": "KEEPSTEP_OTEL exports spans and logs, see docs/telemetry.md",
}
"""Environment variables of torchft that have no effect. Every other one of torchft does what it does there."""

JOIN_TIMEOUT_MS = 100
"""Default of torchft's LighthouseServer: its tests start groups one after another, and wait for none that is late."""

PACKAGE = "megatron.core.dist_checkpointing"
PARENTS = ("megatron", "megatron.core")


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
        name = ALIASES.get(name, name)
        own = importlib.util.find_spec(f"keepstep.{name}" if name else "keepstep")
        if own is None:
            raise ModuleNotFoundError(of_module(name), name=fullname)
        spec = ModuleSpec(fullname, SameModule(own.name, partial(_loaded, name)), origin=own.origin)
        spec.submodule_search_locations = own.submodule_search_locations
        return spec


def _loaded(name: str, module: ModuleType) -> None:
    if not name:
        log_variables()
    if name == "coordination":
        module.LighthouseServer.default_join_timeout_ms = JOIN_TIMEOUT_MS
    if name in NAMES:
        vars(module).setdefault("__getattr__", partial(_refuse, name))


def _refuse(module: str, name: str) -> NoReturn:
    """Raise an ImportError for a name that only torchft has: it is all that ``from ... import ...`` shows."""
    if (reason := of_name(module, name)) is not None:
        raise ImportError(reason, name=f"torchft.{module}")
    raise AttributeError(f"module 'keepstep.{module}' has no attribute {name!r}")


def log_variables() -> None:
    """Log each environment variable of torchft that is set and has no effect."""
    from keepstep_mesh.config.logging import get_logger  # noqa: PLC0415  the finder is there within milliseconds

    log = get_logger("keepstep.compat")
    for name, reason in VARIABLES.items():
        if os.environ.get(name):
            log.warning("variable of torchft has no effect", variable=name, reason=reason)


def of_module(path: str) -> str:
    """Return why ``torchft.<path>`` cannot be imported."""
    instead = MODULES.get(path, "docs/parity.md lists the public names of torchft")
    return f"keepstep, which stands in for torchft, has no module {path!r}: {instead}"


def of_name(module: str, name: str) -> str | None:
    """Return why ``torchft.<module>`` has no ``name``; None if torchft does not have it either."""
    instead = NAMES.get(module, {}).get(name)
    return instead and f"keepstep, which stands in for torchft, has no {module}.{name}: {instead}"


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
