"""Make ``import torchft`` and ``import megatron.core.dist_checkpointing`` import keepstep, so that a script for them
runs without a change.

* ``python -m keepstep.compat train.py`` runs a script, and all processes that it starts.
* ``PYTHONPATH=$(python -m keepstep.compat)`` does the same for a launcher and all processes that it starts.
* ``import keepstep.compat`` before the first ``import torchft`` does it for one process.

``torchft.NAME`` is then the same module object as ``keepstep.NAME``. A name that keepstep does not have raises an
ImportError that says what to use instead. A variable of torchft that has no effect is logged.

``megatron.core.dist_checkpointing`` is ``keepstep.sharded``, and saves that name no format write ``torch_dist``, as
Megatron Core does. Its other modules stay.
"""

from __future__ import annotations

import sys

from keepstep.compat.finder import MegatronFinder, TorchftFinder

__all__: list[str] = []


def _activate() -> None:
    _check("torchft", "keepstep")
    _check("megatron.core.dist_checkpointing", "keepstep.sharded")
    for kind in (TorchftFinder, MegatronFinder):
        if not any(isinstance(one, kind) for one in sys.meta_path):
            sys.meta_path.insert(0, kind())


def _check(name: str, own: str) -> None:
    """Raise ImportError if a module is imported already, and is not ours."""
    imported = sys.modules.get(name)
    if imported not in (None, sys.modules.get(own)) and not hasattr(imported, "IS_KEEPSTEP"):
        place = getattr(imported, "__file__", None) or repr(imported)
        raise ImportError(
            f"{name} is imported already, from {place}: import keepstep.compat before the first import of {name}, or "
            f"start the script with `python -m keepstep.compat`"
        )


_activate()
