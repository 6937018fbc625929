"""Values that a checkpoint does not have."""

from __future__ import annotations

from typing import Any


class LocalNonpersistentObject:
    """A value that is not saved; a load returns the value of the rank that loads.

    Args:
        obj: any value.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj

    def __repr__(self) -> str:
        return f"LocalNonpersistentObject({self.obj!r})"


LocalNonpersitentObject = LocalNonpersistentObject
"""The spelling of earlier versions of Megatron Core."""
