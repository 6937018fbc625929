"""Copy a state in a thread beside the training: before it is asked for (``EarlyCopy``), or after (``LateCopy``).

The early copy of a tensor is right if nothing has written to it since the copy began. torch counts the writes to each
tensor (its version). Writes through ``.data``, numpy or a kernel of the script are not counted, so a few elements of
each copy are compared too. Small tensors, tensors that share memory, and tensors that are not dense on the CPU are left
out: the caller copies them, with all that has changed, when it asks for the state.

Weights and moments change only when an optimizer steps, so their copy may also go on during the forward and backward
pass that follows. Tensors that a pass writes to, as statistics of layers, must be copied before it. ``Unwritten``
learns which those are: a tensor that stayed unwritten in the pass after a copy is copied late from then on, until a
write is seen. A late copy of a tensor that was written to is torn, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from keepstep.state.pack_layout import Array, PackLayout, describe
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.threads.starting import Thread, ThreadPoolExecutor

MIN_BYTES = 1 << 20
"""Smaller tensors are left out: many of them change in a forward pass, as statistics do, and they cost little."""
PIECE_BYTES = 8 << 20
"""Copied at once; the end of the thread waits for one piece."""
SAMPLES = 64
"""Pieces of each tensor that are compared."""
SAMPLE_BYTES = 64
"""Of a piece: single bytes at equal distances would all be the same byte of an element."""
EARLY_COPY_SECONDS = 60.0
"""Limit of the wait for the thread, which only copies memory."""
LATE_SAMPLES = 8
"""Pieces of each tensor that are compared. The training thread reads them from main memory."""
COPY_SECONDS = 120.0
"""Limit of the wait for a copy, which only copies memory."""
TORN = (
    "{count} tensors of the state changed while they were copied beside the forward and backward pass; they are copied "
    "before it from now on"
)

log = get_logger("keepstep.state")


class Copied(NamedTuple):
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
        self._copied: dict[int, Copied] = {}
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
            if copied is None or copied != present(layout, region) or not isinstance(source, torch.Tensor):
                continue
            own, theirs = pack[position : position + copied.nbytes], source.view(torch.uint8).numpy()
            if (samples(own) == samples(theirs)).all():
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
            found, source = present(layout, region), layout.sources[region]
            if found is None or not isinstance(source, torch.Tensor):
                continue
            theirs = source.view(torch.uint8).numpy()  # numpy copies on this thread; torch would start others
            for begin in range(0, found.nbytes, PIECE_BYTES):
                if self._stopped:
                    return
                end = min(begin + PIECE_BYTES, found.nbytes)
                pack[position + begin : position + end] = theirs[begin:end]
            self._copied[position] = found


def samples(source: Array, count: int = SAMPLES) -> Array:
    """Return a copy of about ``count`` pieces of a tensor, of whole elements of any dtype."""
    every = max(SAMPLE_BYTES, len(source) // count)
    few: Array = source[: len(source) // every * every].reshape(-1, every)[:, :SAMPLE_BYTES].copy()
    return few


def present(layout: PackLayout, region: int) -> Copied | None:
    """Return where a region comes from; None: it is left out."""
    source = layout.sources[region]
    if not isinstance(source, torch.Tensor) or source.device.type != "cpu" or region in layout.shared:
        return None
    if source.nbytes < MIN_BYTES or source.dim() != 1 or not source.is_contiguous() or source.is_inference():
        return None
    return Copied(source.data_ptr(), source.nbytes, source._version)  # noqa: SLF001  torch has no other name for it


class LateCopy:
    """The copy of some regions of a state into its pack, on a thread.

    Args:
        layout: of the state.
        pack: gets the bytes.
        watched: regions that can be copied late, with their memory and version now.
        late: those of them to copy.
    """

    def __init__(
        self, layout: PackLayout, pack: torch.Tensor, watched: Mapping[int, Copied], late: frozenset[int]
    ) -> None:
        self.watched = watched
        self.whole: Future[str] = Future()
        """Why the copy is torn; empty: it is whole."""
        self._layout = layout
        self._pack: Array = pack.numpy()
        self._late = {
            region: (source := self._source(region), samples(source, LATE_SAMPLES)) for region in sorted(late)
        }
        """Memory, and a few bytes of now."""
        self._torn: set[int] = set()
        if not late:
            self.whole.set_result("")

    def run(self) -> None:
        """Copy, on the thread of the caller."""
        try:
            positions = self._layout.content.positions()
            for region, (source, before) in self._late.items():
                target = self._pack[positions[region] : positions[region] + len(source)]
                for start in range(0, len(source), PIECE_BYTES):
                    target[start : start + PIECE_BYTES] = source[start : start + PIECE_BYTES]
                if self.written(region) or not np.array_equal(samples(target, LATE_SAMPLES), before):
                    self._torn.add(region)
            self.whole.set_result(TORN.format(count=len(self._torn)) if self._torn else "")
        except Exception as error:  # noqa: BLE001  it is the outcome of the copy
            self.whole.set_result(f"{type(error).__name__}: {error}")

    def written(self, region: int) -> bool:
        """Return whether a watched region has been written to since the copy began."""
        source = self._layout.sources[region]
        counted = isinstance(source, torch.Tensor) and source._version != self.watched[region].version  # noqa: SLF001
        return counted or region in self._torn

    def _source(self, region: int) -> Array:
        source = self._layout.sources[region]
        assert isinstance(source, torch.Tensor)
        array: Array = source.view(torch.uint8).numpy()
        return array


class Unwritten:
    """Which tensors passes leave unchanged. On the training thread; the copies run on a thread of this object."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], bool] = {}
        """By address and length of a tensor: whether no pass has written to it."""
        self._copy: LateCopy | None = None
        """Not settled yet."""
        self._thread: ThreadPoolExecutor | None = None

    def begin(self, layout: PackLayout, pack: torch.Tensor, there: frozenset[int]) -> Future[str]:
        """Copy ``layout`` into ``pack``, and go on with what may be copied late until ``settle``.

        Args:
            layout: of the state.
            pack: as for ``PackLayout.copy_into``.
            there: regions that it holds already.

        Returns:
            See ``LateCopy.whole``.
        """
        self.settle()
        found = ((region, present(layout, region)) for region in range(len(layout.sources)))
        watched = {region: one for region, one in found if one is not None}
        late = frozenset(region for region, one in watched.items() if self._known.get(_key(one), False)) - there
        layout.copy_into(pack, there | late)
        copy = LateCopy(layout, pack, watched, late)
        if late:
            self._thread = self._thread or ThreadPoolExecutor(1, "keepstep-late-copy")
            self._thread.submit(copy.run)
        self._copy = copy
        return copy.whole

    def settle(self) -> None:
        """Wait until the state may change, and note what has been written to since the copy began."""
        copy, self._copy = self._copy, None
        if copy is None:
            return
        copy.whole.result(COPY_SECONDS)
        before = self._known
        self._known = {
            key: before.get(key, True) and not copy.written(region)
            for region, one in copy.watched.items()
            if (key := _key(one))
        }

    def close(self) -> None:
        """End the thread."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _key(one: Copied) -> tuple[int, int]:
    return one.address, one.nbytes
