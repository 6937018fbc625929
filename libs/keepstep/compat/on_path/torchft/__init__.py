"""Stands in for torchft where this folder's parent is on PYTHONPATH: puts keepstep in its place.

Another thread that imports ``torchft.NAME`` while this file runs does not wait for it, and finds no such module.
"""

IS_KEEPSTEP = True  # read by keepstep.compat, which refuses another torchft

import sys  # noqa: E402
from typing import Any  # noqa: E402

import keepstep  # noqa: E402
from keepstep.compat import finder  # noqa: E402

finder.log_variables()
sys.modules[__name__] = keepstep


def __getattr__(name: str) -> Any:
    """Return an attribute of keepstep to a thread that began to import this module before it was replaced."""
    return getattr(keepstep, name)
