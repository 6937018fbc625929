"""Look into the files of a checkpoint, and damage them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keepstep.checkpoint import StoredCheckpoint, open_reader


def stored(path: Path) -> dict[Any, Any]:
    reader = open_reader(path)
    try:
        return StoredCheckpoint(reader).state_dict()
    finally:
        reader.close()


def files(folder: Path) -> set[str]:
    return {one.name for one in folder.iterdir()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
