"""Checkpoints of Lightning at a relay, which verifies every byte and commits a checkpoint whole or not at all."""

from __future__ import annotations

import io
import re
from contextlib import suppress
from datetime import timedelta
from pathlib import PurePath
from typing import Any

import torch

from keepstep.checkpoint.places.relay_files import RelayFiles
from keepstep.integrations.lightning.lightning_modules import checkpoint_io
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import chunk_count

log = get_logger("keepstep.integrations")

FILE = "checkpoint.pt"
"""Name of the only file of a checkpoint."""


class RelayCheckpointIO(checkpoint_io.CheckpointIO):  # type: ignore[misc]  # its package may be missing
    """Saves, loads and removes checkpoints of a ``Trainer`` at a relay: ``Trainer(plugins=[RelayCheckpointIO(url)])``.

    The name of a file is the name of the checkpoint, without its folder and ``.ckpt``, and with ``-`` for characters
    that the relay does not allow: ``epoch=1-step=20.ckpt`` is stored as ``epoch-1-step-20``.

    Args:
        url: ``http://RELAY:29520/v1/jobs/JOB/checkpoints``.
        kind: ``"durable"``, or ``"live"``: the relay may drop it when newer ones exist, and may have it in memory only.
        timeout: time limit of one call.
        token: token for the relay. None: that of the environment. Removing a checkpoint needs an admin token.

    Raises:
        CheckpointError: the url is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        kind: str = "durable",
        timeout: timedelta = timedelta(minutes=10),
        token: str | None = None,
    ) -> None:
        super().__init__()
        self._files = RelayFiles(url, kind=kind, timeout=timeout, token=token)

    @staticmethod
    def name(path: object) -> str:
        """Return the name of the checkpoint that Lightning calls ``path``."""
        return re.sub(r"[^A-Za-z0-9._-]", "-", PurePath(str(path)).name.removesuffix(".ckpt"))

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write and commit a checkpoint. One of that name is removed first.

        Args:
            checkpoint: what ``torch.save`` can write.
            path: its file name is the name of the checkpoint.
            storage_options: not supported.

        Raises:
            TypeError: ``storage_options`` was given.
            OSError: the relay did not store the checkpoint, or one of that name may not be removed.
        """
        if storage_options is not None:
            raise TypeError("RelayCheckpointIO takes no storage_options; pass its settings to the constructor")
        name, data = self.name(path), io.BytesIO()
        torch.save(checkpoint, data)
        # copies nothing; Python 3.12 crashes when it collects a view of getbuffer() that a cycle refers to
        self._files.write(f"tmp_{name}", FILE, memoryview(data.getvalue()))
        with suppress(FileNotFoundError):
            self._files.remove(name)
        self._files.commit(f"tmp_{name}", name, step=int(checkpoint.get("global_step", 0)))

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a checkpoint.

        Args:
            path: as in ``save_checkpoint``.
            map_location: as in ``torch.load``.
            weights_only: False is refused: what comes over the network must not run code.

        Raises:
            ValueError: ``weights_only`` is False.
            FileNotFoundError: the relay has no checkpoint of that name.
            CheckpointDamaged: a chunk is not what was written.
            OSError: the relay did not answer.
        """
        if weights_only is False:
            raise ValueError(
                "weights_only=False would run code of a checkpoint that came over the network; leave it out, and save "
                "only tensors and plain values"
            )
        name = self.name(path)
        file = self._files.files(name).get(FILE)
        if file is None or not file.is_committed:
            raise FileNotFoundError(f"no checkpoint {name!r} of Lightning at the relay; known: {self._files.folders()}")
        data = bytearray()
        for number in range(chunk_count(file.size)):
            data += self._files.chunk(file, number)
        loaded: dict[str, Any] = torch.load(io.BytesIO(data), map_location=map_location, weights_only=True)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint. Without an admin token, log that it stays.

        Args:
            path: as in ``save_checkpoint``.
        """
        try:
            self._files.remove(self.name(path))
        except FileNotFoundError:
            return
        except PermissionError as error:
            log.warning("checkpoint not removed: the token is no admin token", name=self.name(path), reason=str(error))

    def teardown(self) -> None:
        """Give no more signs of life of files that are not committed."""
        self._files.close()
