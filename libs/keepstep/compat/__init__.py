"""Make ``import torchft`` import keepstep, so that a script for torchft runs without a change.

* ``python -m keepstep.compat train.py`` runs a script, and all processes that it starts.
* ``PYTHONPATH=$(python -m keepstep.compat)`` does the same for a launcher and all processes that it starts.
* ``import keepstep.compat`` before the first ``import torchft`` does it for one process.

``torchft.NAME`` is then the same module object as ``keepstep.NAME``. A name that keepstep does not have raises an
ImportError that says what to use instead. A variable of torchft that has no effect is logged.
"""

from __future__ import annotations

import sys

from keepstep.compat.finder import TorchftFinder

__all__: list[str] = []


def _activate() -> None:
    imported = sys.modules.get("torchft")
    if imported not in (None, sys.modules["keepstep"]) and not hasattr(imported, "IS_KEEPSTEP"):
        place = getattr(imported, "__file__", None) or repr(imported)
        raise ImportError(
            f"torchft is imported already, from {place}: import keepstep.compat before the first import of torchft, or "
            "start the script with `python -m keepstep.compat`"
        )
    if not any(isinstance(one, TorchftFinder) for one in sys.meta_path):
        sys.meta_path.insert(0, TorchftFinder())


_activate()
