"""The layout of one wrapped module, which grows when the script, or the job of a new group, trains more parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from keepstep.data_parallel.trained_parameters import TrainedParameters


class ModuleLayout:
    """Implements ``keepstep.group.agreement.LayoutPart``.

    Args:
        header: the first line: how the gradients are reduced.
        trained: the parameters of the module.
        buffers: a line for each buffer.
        rebuild: called after the members have changed.
    """

    def __init__(
        self, header: str, trained: TrainedParameters, buffers: Sequence[str], rebuild: Callable[[], None]
    ) -> None:
        self._header = header
        self._trained = trained
        self._buffers = list(buffers)
        self._rebuild = rebuild
        self._lines = self._describe()

    def lines(self) -> list[str]:
        """Return the lines. If the members have changed, this rebuilds the reducer: call it between two steps."""
        if self._trained.changed():
            self._refresh()
        return self._lines

    def matching(self, lines: Sequence[str]) -> int:
        """Return the number of the first ``lines`` that this module could have. 0: it cannot."""
        if not lines or lines[0] != self._header:
            return 0
        end = 1 + len(self._trained.adoptable(lines[1:]))
        after = end + len(self._buffers)
        return after if end > 1 and list(lines[end:after]) == self._buffers else 0

    def adopt(self, lines: Sequence[str]) -> None:
        """Train the parameters of ``lines``, which ``matching`` found to fit."""
        self._refresh(self._trained.adoptable(lines[1:]))

    def _refresh(self, adopted: Sequence[str] = ()) -> None:
        if self._trained.refresh(adopted):
            self._rebuild()
        self._lines = self._describe()

    def _describe(self) -> list[str]:
        return [self._header, *self._trained.lines(), *self._buffers]
