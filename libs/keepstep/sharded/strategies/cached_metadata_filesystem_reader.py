"""Public: a reader of torch.distributed.checkpoint that reads ``.metadata`` once, under the name of Megatron Core."""

from __future__ import annotations

from typing import Any

from torch.distributed.checkpoint import FileSystemReader, Metadata


class CachedMetadataFileSystemReader(FileSystemReader):
    """Reads ``.metadata`` once. ``dcp.load`` takes it as ``storage_reader``.

    Args:
        path: directory of a checkpoint.
    """

    _metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the checkpoint."""
        if self._metadata is None:
            self._metadata = super().read_metadata(*args, **kwargs)
        return self._metadata
