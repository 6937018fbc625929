"""Saves and loads with parts of torch.distributed.checkpoint: a planner, a storage, a stager, or a process.

torch's own function runs then, and keepstep is its storage, unless the caller gives another one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from keepstep.state.errors import CheckpointError

Place = str | os.PathLike[str]
S = TypeVar("S")


class TorchParts:
    """Arguments of a function of torch that the caller gave.

    Args:
        parts: planners, storages and the like, by the names of torch's arguments; None: not given.
        others: arguments that torch's function has too, but which do not need it.
    """

    def __init__(self, parts: Mapping[str, Any], others: Mapping[str, Any]) -> None:
        self._given = {name: one for name, one in parts.items() if one is not None}
        self._others = dict(others)

    def __bool__(self) -> bool:
        return bool(self._given)

    def call(self, function: str, state_dict: Any, place: Place | None, storage: str, options: dict[str, Any]) -> Any:
        """Call a function of torch.

        Args:
            function: its name.
            state_dict: its first argument.
            place: ``checkpoint_id``.
            storage: ``storage_writer`` or ``storage_reader``.
            options: of the storage of keepstep, if none was given.

        Raises:
            CheckpointError: neither a place nor a storage was given.
        """
        if storage not in self._given:
            kind = "RelayWriter" if storage == "storage_writer" else "RelayReader"
            public = importlib.import_module("keepstep.checkpoint")  # torch's import takes long
            self._given[storage] = getattr(public, kind)(given(place, storage), **options)
        dcp = importlib.import_module("torch.distributed.checkpoint")
        return getattr(dcp, function)(state_dict, checkpoint_id=place, **self._given, **self._others)


def place_and_storage(second: Any, storage: S | None) -> tuple[Place | None, S | None]:
    """Return ``checkpoint_id`` and the storage of a call. Its second argument may be either, as in torch."""
    if storage is None and second is not None and not isinstance(second, (str, os.PathLike)):
        return None, second
    return second, storage


def given(place: Place | None, storage: str) -> Place:
    """Return ``place``. Raises ``CheckpointError`` if it is None."""
    if place is None:
        raise CheckpointError(f"the checkpoint has no place: pass checkpoint_id, or {storage} of torch")
    return place
