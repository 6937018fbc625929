"""Whether a save is complete although its ranks failed at its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from keepstep.checkpoint.loading import open_reader
from keepstep.checkpoint.places.directory import RECORD
from keepstep.checkpoint.places.location import InDirectory, parse
from keepstep_megatron.core import CONFIG_FNAME
from keepstep_megatron.stages import StageFailed
from keepstep_megatron.strategies.interfaces import CheckpointDir
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError

log = get_logger("keepstep.sharded")


class FailedAfterCommit(StageFailed):
    """The ranks failed, but the checkpoint is complete."""


@contextmanager
def naming_outcome(checkpoint_dir: CheckpointDir) -> Iterator[None]:
    """If the ranks fail in this block, and the checkpoint is complete, let the error say so."""
    try:
        yield
    except FailedAfterCommit:  # an inner block has named it
        raise
    except StageFailed as error:
        if not is_complete(checkpoint_dir):
            raise
        reason = str(error).removeprefix(f"{checkpoint_dir} was not saved: ")
        raise FailedAfterCommit(
            f"{checkpoint_dir} is complete, and can be loaded; but the ranks failed after its commit: {reason}"
        ) from error


def is_complete(checkpoint_dir: CheckpointDir) -> bool:
    """Return whether a checkpoint can be loaded. False also if its relay does not answer."""
    location = parse(checkpoint_dir)
    if isinstance(location, InDirectory):
        return any((location.path / name).exists() for name in (RECORD, CONFIG_FNAME))
    reader = open_reader(checkpoint_dir, timeout=timedelta(seconds=10))
    try:
        reader.manifests()
    except (KeepstepError, TimeoutError) as error:
        log.info("checkpoint not found after the ranks failed", checkpoint=str(checkpoint_dir), reason=str(error))
        return False
    finally:
        reader.close()
    return True
