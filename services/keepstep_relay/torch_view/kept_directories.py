"""Directories of torch.distributed.checkpoint that are kept for the next request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from keepstep_relay.core.events import Key
from keepstep_relay.torch_view.torch_files import TorchDirectory

MAX_DIRECTORIES = 4


class KeptDirectories:
    """Keeps the directories that were used last.

    Args:
        release: called with the ``literal_bytes`` of each directory that is dropped. The caller counts them before
            ``keep``.
    """

    def __init__(self, release: Callable[[int], None]) -> None:
        self._release = release
        self._kept: OrderedDict[Key, tuple[tuple[bytes, ...], TorchDirectory]] = OrderedDict()
        """With the roots of the manifests. The one that was used last is at the end."""

    def get(self, key: Key, roots: tuple[bytes, ...]) -> TorchDirectory | None:
        """Return the directory of a checkpoint whose manifests have these roots; None: it is not kept."""
        if key not in self._kept:
            return None
        known, directory = self._kept[key]
        if known != roots:
            self.drop(key)
            return None
        self._kept.move_to_end(key)
        return directory

    def make_room(self) -> None:
        """Drop directories until one more can be kept."""
        while len(self._kept) >= MAX_DIRECTORIES:
            self.drop(next(iter(self._kept)))

    def keep(self, key: Key, roots: tuple[bytes, ...], directory: TorchDirectory) -> None:
        """Keep a directory, after ``make_room``."""
        self._kept[key] = roots, directory

    def drop(self, key: Key) -> None:
        """Drop the directory of a checkpoint, if it is kept."""
        if (kept := self._kept.pop(key, None)) is not None:
            self._release(kept[1].literal_bytes)
