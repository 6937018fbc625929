"""Copy a state before it is asked for, in a thread beside the training, and find out what has changed since.

The copy of a tensor is right if nothing has written to it since the copy began. torch counts the writes to each tensor
(its version). Writes through ``.data``, numpy or a kernel of the script are not counted, so a few elements of each copy
are compared too. Small tensors, tensors that share memory, and tensors that are not dense on the CPU are left out: the
caller copies them, with all that has changed, when it asks for the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from keepstep.state.pack_layout import Array, PackLayout, describe
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.threads.starting import Thread

MIN_BYTES = 1 << 20
"""Smaller tensors are left out: many of them change in a forward pass, as statistics do, and they cost little."""
PIECE_BYTES = 8 << 20
"""Copied at once; the end of the thread waits for one piece."""
SAMPLES = 64
"""Bytes of each tensor that are compared."""
EARLY_COPY_SECONDS = 60.0
"""Limit of the wait for the thread, which only copies memory."""

log = get_logger("keepstep.state")


class _Copied(NamedTuple):
    """Which memory a part of the buffer was copied from."""

    address: int
    nbytes: int
    version: int


class EarlyCopy:
    """One copy, on a thread of its own.

    Args:
        step: of the state.
        state: as for ``describe``. Its structure may be older than the state; its tensors are those of the state.
        take: returns a buffer of at least so many bytes, or None: then nothing is copied.
    """

    def __init__(self, step: int, state: Any, take: Callable[[int], torch.Tensor | None]) -> None:
        self.step = step
        self.buffer: torch.Tensor | None = None
        """Set before anything is copied."""
        self._copied: dict[int, _Copied] = {}
        """By position in the buffer."""
        self._stopped = False
        self._thread = Thread(target=self._run, args=(state, take), name="keepstep-early-copy", daemon=True)
        self._thread.start()

    def stop(self) -> torch.Tensor | None:
        """End the thread, and return the buffer for other use."""
        self._stopped = True
        return self.buffer if self._ended() else None

    def right(self, layout: PackLayout) -> tuple[torch.Tensor | None, frozenset[int]]:
        """Wait until everything is copied. Return the buffer, and the regions of ``layout`` that it holds already."""
        if not self._ended() or self.buffer is None:
            return None, frozenset()
        pack: Array = self.buffer.numpy()
        found = []
        for region, position in enumerate(layout.content.positions()[:-1]):
            copied, source = self._copied.get(position), layout.sources[region]
            if copied is None or copied != _present(layout, region) or not isinstance(source, torch.Tensor):
                continue
            own, theirs = pack[position : position + copied.nbytes], source.view(torch.uint8).numpy()
            every = max(1, copied.nbytes // SAMPLES)
            if (own[::every] == theirs[::every]).all():
                found.append(region)
        return self.buffer, frozenset(found)

    def _ended(self) -> bool:
        self._thread.join(EARLY_COPY_SECONDS)
        return not self._thread.is_alive()

    def _run(self, state: Any, take: Callable[[int], torch.Tensor | None]) -> None:
        try:
            layout = describe(state)
            self.buffer = take(layout.content.positions()[-1])
            if self.buffer is not None:
                self._copy(layout, self.buffer.numpy())
        except Exception as error:  # noqa: BLE001  the caller copies what is missing, and raises the same error
            log.debug("state not copied early", step=self.step, reason=f"{type(error).__name__}: {error}")

    def _copy(self, layout: PackLayout, pack: Array) -> None:
        for region, position in enumerate(layout.content.positions()[:-1]):
            present, source = _present(layout, region), layout.sources[region]
            if present is None or not isinstance(source, torch.Tensor):
                continue
            theirs = source.view(torch.uint8).numpy()  # numpy copies on this thread; torch would start others
            for begin in range(0, present.nbytes, PIECE_BYTES):
                if self._stopped:
                    return
                end = min(begin + PIECE_BYTES, present.nbytes)
                pack[position + begin : position + end] = theirs[begin:end]
            self._copied[position] = present


def _present(layout: PackLayout, region: int) -> _Copied | None:
    """Return where a region comes from; None: it is left out."""
    source = layout.sources[region]
    if not isinstance(source, torch.Tensor) or source.device.type != "cpu" or region in layout.shared:
        return None
    if source.nbytes < MIN_BYTES or source.dim() != 1 or not source.is_contiguous() or source.is_inference():
        return None
    return _Copied(source.data_ptr(), source.nbytes, source._version)  # noqa: SLF001  torch has no other name for it
