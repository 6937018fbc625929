"""The record of a sharded checkpoint, ``metadata.json``: which backends wrote it. It is written last."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from keepstep.checkpoint.places.durable_files import write_whole
from keepstep.state.errors import CheckpointError

CONFIG_FNAME = "metadata.json"
MAX_CONFIG_BYTES = 1 << 20


class CheckpointingException(CheckpointError):
    """A sharded state is invalid, or was not saved or loaded."""


@dataclass
class CheckpointingConfig:
    """Backends of a sharded checkpoint. The versions are those of formats, not of the content.

    Args:
        sharded_backend: format of sharded tensors, such as ``torch_dist``.
        sharded_backend_version: of that format.
        common_backend: format of the other values.
        common_backend_version: of that format.
    """

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def parse_config(text: str | bytes) -> CheckpointingConfig:
    """Read the text of ``metadata.json``. Fields of later versions are ignored. Raises ``CheckpointingException``."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointingException(f"invalid {CONFIG_FNAME}: not JSON ({error})") from error
    if not isinstance(values, dict) or not isinstance(values.get("sharded_backend"), str):
        raise CheckpointingException(f"invalid {CONFIG_FNAME}: expected an object with the string 'sharded_backend'")
    known = {one.name: values[one.name] for one in fields(CheckpointingConfig) if one.name in values}
    for name, value in known.items():
        expected = int if name.endswith("_version") else str
        if type(value) is not expected:
            raise CheckpointingException(f"invalid {CONFIG_FNAME}: {name} is {value!r}, expected {expected.__name__}")
    return CheckpointingConfig(**known)


def load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig:
    """Return the record of a checkpoint.

    Args:
        checkpoint_dir: directory of the checkpoint.

    Raises:
        CheckpointingException: the directory has no record, or an invalid one.
    """
    path = Path(checkpoint_dir, CONFIG_FNAME)
    try:
        with path.open("rb") as file:
            text = file.read(MAX_CONFIG_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not path.parent.is_dir():
            raise CheckpointingException(f"Checkpoint directory {path.parent} does not exist") from error
        raise CheckpointingException(
            f"{path.parent} is not a distributed checkpoint: it has no {CONFIG_FNAME}, which is written last"
        ) from error
    if len(text) > MAX_CONFIG_BYTES:
        raise CheckpointingException(f"invalid {path}: larger than {MAX_CONFIG_BYTES} bytes")
    return parse_config(text)


def maybe_load_config(checkpoint_dir: str | os.PathLike[str]) -> CheckpointingConfig | None:
    """Return the record of a checkpoint, or None if the directory is not a complete sharded checkpoint.

    Args:
        checkpoint_dir: directory of the checkpoint.
    """
    try:
        return load_config(checkpoint_dir) if checkpoint_dir else None
    except CheckpointingException:
        return None


def check_is_distributed_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> bool:
    """Return whether the directory has a valid ``metadata.json``.

    Args:
        checkpoint_dir: directory of the checkpoint.
    """
    return maybe_load_config(checkpoint_dir) is not None


def save_config(config: CheckpointingConfig, checkpoint_dir: str | os.PathLike[str]) -> None:
    """Write ``metadata.json``, whole or not at all. It marks the checkpoint as complete.

    Args:
        config: the record.
        checkpoint_dir: directory of the checkpoint; it exists.
    """
    write_whole(Path(checkpoint_dir, CONFIG_FNAME), json.dumps(asdict(config)).encode())
