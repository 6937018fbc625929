"""Numpy arrays and defaultdicts in files of torch.save, built from their fields.

numpy's own functions must not be allowed in a file from elsewhere: ``numpy.ndarray(shape, "O", buffer)`` makes pointers
of the bytes in the file. Files call the classes of this module under the names of numpy.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any

import numpy as np

from keepstep.state.values.leaves import numpy_dtype

MODULES = ("numpy._core.multiarray", "numpy.core.multiarray")


class PickledDtype:
    """A ``numpy.dtype``."""

    def __init__(self, code: Any, *_: Any) -> None:
        self._code = code
        self._order, self._unit = "<", ""

    def __setstate__(self, state: Any) -> None:
        _, order, *structure = state[:5]
        if any(one is not None for one in structure):
            raise ValueError("numpy array with named fields")
        self._order = "<" if order == "=" else order
        if len(state) > 8:  # a time: unit and its factor
            unit, factor = state[8][1][:2]
            self._unit = f"[{factor}{unit if isinstance(unit, str) else unit.decode()}]"

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype. Raises ``ManifestError`` for one with objects."""
        return np.dtype(numpy_dtype(f"{self._order}{self._code}{self._unit}".replace("[1", "[")))


class PickledArray:
    """A ``numpy.ndarray``. ``array`` is set when the file gives its fields."""

    array: np.ndarray[Any, Any]

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, fortran_order, data = state
        if type(dtype) is not PickledDtype or type(data) is not bytes:
            raise ValueError("numpy array of objects")
        self.array = np.frombuffer(data, dtype.dtype()).reshape(shape, order="F" if fortran_order else "C").copy("K")


def reconstruct(*_: Any) -> PickledArray:
    """Take the place of ``numpy._core.multiarray._reconstruct``."""
    return PickledArray()


def scalar(dtype: PickledDtype, data: bytes) -> Any:
    """Take the place of ``numpy._core.multiarray.scalar``."""
    return np.frombuffer(data, dtype.dtype())[0]


def no_bytes() -> bytes:
    """Take the place of ``bytes()``, which is how pickle writes the data of an empty array."""
    return b""


class Factory:
    """Takes the place of a type, such as the factory of a ``defaultdict``: a file cannot call it."""

    def __init__(self, kind: type) -> None:
        self.kind = kind


def default_dict(factory: Any = None) -> OrderedDict[Any, Any]:
    """Take the place of ``collections.defaultdict``: torch puts items only into plain dicts. See ``with_arrays``."""
    made: OrderedDict[Any, Any] = OrderedDict()
    vars(made)[_FACTORY] = factory
    return made


_FACTORY = "default_factory"
_TORCH_ALLOWS = (set, complex, bytearray, OrderedDict, Counter)
CONTAINERS: list[Any] = [
    (default_dict, "collections.defaultdict"),
    *(
        (Factory(kind), f"{module}.{kind.__name__}")
        for module in ("builtins", "__builtin__")
        for kind in (bool, int, float, list, tuple, dict)
    ),
]
"""The same for defaultdicts."""
ALLOWED: list[Any] = [
    *((no_bytes, name) for name in ("builtins.bytes", "__builtin__.bytes")),
    (PickledArray, "numpy.ndarray"),
    (PickledDtype, "numpy.dtype"),
    *((reconstruct, f"{module}._reconstruct") for module in MODULES),
    *((scalar, f"{module}.scalar") for module in MODULES),
]
"""Classes and functions for ``torch.serialization.safe_globals``, with the names that files call."""


def _type_of(factory: Any) -> Any:
    if type(factory) is Factory:
        return factory.kind
    if factory is None or any(factory is one for one in _TORCH_ALLOWS):
        return factory
    raise ValueError(f"defaultdict whose default_factory is {str(factory)[:100]}")


def with_arrays(value: Any, most: int) -> Any:
    """Return ``value`` with numpy arrays, dtypes and defaultdicts in place of those of this module.

    Args:
        value: lists, tuples, and dicts are walked.
        most: number of values that it may have. Lists that contain each other twice, 40 levels deep, take few bytes in
            a file and have 2**40 values.

    Raises:
        ValueError: it has more values.
    """
    left = most

    def visit(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError(f"more than {most} values: a list or dict contains itself, or is contained several times")
        if type(value) is PickledArray:
            return value.array
        if type(value) is PickledDtype:
            return value.dtype()
        if isinstance(value, dict):
            for key, item in value.items():
                value[key] = visit(item)
            if type(value) is OrderedDict and _FACTORY in vars(value):
                return defaultdict(_type_of(vars(value)[_FACTORY]), value)
        elif type(value) is list:
            value[:] = map(visit, value)
        elif type(value) is tuple:
            return tuple(map(visit, value))
        return value

    return visit(value)
