"""``common.pt``: the part of a state without sharded leaves, as torch.save writes it. Megatron Core reads it.

Checkpoints of Megatron Core 0.19 have none; the object ``common_state`` takes its place.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from keepstep.checkpoint.places.durable_files import write_whole
from keepstep_formats.dcp_metadata import METADATA
from keepstep_formats.pickled_items import load_pickled, write_pickled
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import StateDict
from keepstep_megatron.strategies.interfaces import CheckpointDir, LoadCommonStrategy, SaveCommonStrategy
from keepstep_megatron.strategies.stored_dist import TorchDistState
from keepstep_megatron.strategies.stored_state import COMMON_STATE_KEY

COMMON_STATE_FNAME = "common.pt"


class CommonFileSave(SaveCommonStrategy):
    """Writes ``common.pt``."""

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        super().__init__(backend, version)

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveCommonStrategy``."""
        buffer = io.BytesIO()
        write_pickled(common_state_dict, buffer)
        write_whole(Path(checkpoint_dir, COMMON_STATE_FNAME), buffer.getvalue())


class CommonFileLoad(LoadCommonStrategy):
    """Reads ``common.pt`` without running code from it.

    Args:
        allow_pickle: run the code that the file names. Only for a file of one's own.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle

    def load_common(self, checkpoint_dir: CheckpointDir) -> StateDict:
        """See ``LoadCommonStrategy``.

        Raises:
            RefusedClass: the file has objects of other classes than tensors and plain values.
            CheckpointingException: the file does not exist.
        """
        path = Path(checkpoint_dir, COMMON_STATE_FNAME)
        try:
            state = load_pickled(path.read_bytes(), str(path), allow_pickle=self._allow_pickle)
        except FileNotFoundError:
            state = self._stored_object(path)
        if not isinstance(state, dict):
            raise CheckpointingException(f"{path} has a {type(state).__name__}, expected a dict")
        return state

    def _stored_object(self, path: Path) -> Any:
        """Return the object that takes the place of the file."""
        if (path.parent / METADATA).exists():
            stored = TorchDistState(path.parent, allow_pickle=self._allow_pickle)
            if COMMON_STATE_KEY in stored.objects:
                return stored.value(COMMON_STATE_KEY)
        raise CheckpointingException(
            f"{path} not found, and {path.parent} has no object {COMMON_STATE_KEY!r}: the checkpoint is incomplete"
        )
