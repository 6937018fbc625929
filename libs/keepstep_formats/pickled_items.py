"""Values of torch.save: read without running code from them, and written. No other module uses pickle."""

from __future__ import annotations

import copyreg
import io
import lzma
import math
import pickle
import re
import struct
import threading
import zipfile
import zlib
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from functools import lru_cache
from pathlib import Path, PosixPath, PurePosixPath, PureWindowsPath
from typing import IO, TYPE_CHECKING, Any

import torch
from torch.torch_version import TorchVersion

from keepstep_formats.finished_output import finished_output
from keepstep_formats.foreign_errors import CannotHold, ForeignCheckpointError, RefusedClass
from keepstep_formats.pickled_arrays import ALLOWED, CONTAINERS, with_arrays
from keepstep_mesh.protocol.boxes import Sizes
from keepstep_mesh.text import listed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

MAX_NAMED = 5
PROTOCOL = 2
"""Of pickle, as torch.save writes it."""
VALUES_PER_BYTE = 64
"""More than a file has whose values are not shared many times."""
_UNREADABLE = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, TypeError),
    *(KeyError, IndexError, AttributeError, MemoryError, AssertionError, ArithmeticError, struct.error),
)
BAD_ZIP = (
    *(zipfile.BadZipFile, EOFError, OSError, RuntimeError, ValueError),
    *(struct.error, zlib.error, lzma.LZMAError),
)
"""Errors of zipfile on a damaged file: it has no common one."""
_PROTOCOL = 2
"""Of the pickles of torch.save."""
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
    torch.complex64: torch.ComplexFloatStorage,
    torch.complex128: torch.ComplexDoubleStorage,
}
"""Classes that torch.save names for dtypes. Of others, such as float8, it names the dtype."""
_CONTAINERS = (list, tuple, dict, set)
_SCALARS = (type(None), bool, float, complex, str)
_SURE_DEPTH = 50
_SURE_BITS = 64
_UNSUPPORTED = re.compile(r"\bGLOBAL ([\w.]+)")
"""The class in torch's message about a file in its format before 1.6."""
_allowing = threading.RLock()
_COLOR = re.compile(r"\x1b\[\d*m")
_REASON = re.compile(r"WeightsUnpickler error:\s*(\S.*)")
"""The reason in a message of torch about a file that ``weights_only=True`` does not load."""
_ADVICE = " In PyTorch 2.6"
"""Where a message of torch begins to advise that the file be loaded with ``weights_only=False``."""
_MAGIC = b"\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""A number at the start of each file in the format before torch 1.6."""
_ARCHIVES = {
    "constants.pkl": "a TorchScript archive",
    "archive_format": "an archive of torch.export",
    ".npy": "an archive of numpy",
}
"""Kinds of zip files that torch.save does not write, by the ends of their names."""


@contextmanager
def plain_values(arrays: Sequence[Any] = ALLOWED) -> Iterator[None]:
    """Allow plain values in ``torch.load(weights_only=True)``: numpy arrays, times, paths, and others.

    Classes that the process allows are allowed too. torch has one list for all threads, and takes any of two entries of
    one name.

    Args:
        arrays: stand-ins for names of numpy, which hide what the process has allowed under these names.
    """
    names = {name for _, name in (*arrays, *CONTAINERS)}
    with _allowing:
        before = torch.serialization.get_safe_globals()
        kept = [one for one in before if _name_of(one) not in names]
        own = [*arrays, *CONTAINERS, *_HARMLESS]
        try:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals([*kept, *own])
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _name_of(allowed: Any) -> str:
    return str(allowed[1]) if isinstance(allowed, tuple) else f"{allowed.__module__}.{allowed.__qualname__}"


def _allows_arrays() -> bool:
    """Return whether the process has allowed functions of numpy, which read arrays that this module does not."""
    return any(_name_of(one).startswith("numpy.") for one in torch.serialization.get_safe_globals())


_HARMLESS = [
    *(datetime, date, time, timedelta, timezone, io.BytesIO, Namespace, frozenset, TorchVersion),
    *(PosixPath, PurePosixPath, PureWindowsPath),
]


def load_file(path: Path, *, allow_pickle: bool = False) -> Any:
    """Return the value in a file of torch.save. See ``load_pickled``."""
    try:
        return load_pickled(path, str(path), allow_pickle=allow_pickle)
    except RefusedClass as error:
        raise RefusedClass(
            f"{error}. --allow-pickle runs the code of the file: only for a file of your own."
        ) from error


def load_pickled(data: bytes | Path, what: str, *, allow_pickle: bool = False) -> Any:
    """Return the value that torch.save wrote, with tensors on the CPU.

    Args:
        data: a file, or its bytes.
        what: name of the file or item, for errors.
        allow_pickle: run the code that the file names. Only for a file of one's own.

    Raises:
        RefusedClass: the value has objects of other classes than tensors and plain values.
        ForeignCheckpointError: the file is damaged, or was not written by torch.save.
    """

    def opened() -> IO[bytes]:
        return data.open("rb") if isinstance(data, Path) else io.BytesIO(data)

    with opened() as file:
        is_zip = check_sums(file, what)
        file.seek(0)
        if not is_zip and _MAGIC not in (start := file.read(64)):
            kind = "a pickle, which is not run" if start[:1] == b"\x80" else "no file of torch.save"
            raise ForeignCheckpointError(f"{what} cannot be read: it is {kind}: write it with torch.save")
    mapped = isinstance(data, Path) and is_zip

    def loaded(arrays: Sequence[Any]) -> Any:
        source: Any = data if mapped else opened()
        try:
            with plain_values(arrays):
                value = torch.load(source, map_location="cpu", weights_only=not allow_pickle, mmap=mapped or None)
        finally:
            if not mapped:
                source.close()
        size = data.stat().st_size if isinstance(data, Path) else len(data)
        return value if allow_pickle else with_arrays(value, VALUES_PER_BYTE * size)

    try:
        try:
            return loaded(ALLOWED)
        except _UNREADABLE:
            if allow_pickle or not _allows_arrays():
                raise
            return loaded(())
    except RecursionError as error:
        raise ForeignCheckpointError(f"{what} has a value that is nested too deep, or contains itself") from error
    except _UNREADABLE as error:
        names = [] if allow_pickle else _other_classes(opened) or _UNSUPPORTED.findall(str(error))
        if names:
            raise RefusedClass(
                f"{what} has objects of {listed(names, MAX_NAMED)}, which is neither a tensor nor a plain value; "
                f"nothing was run. Load it in a program that knows them (torch.serialization.safe_globals), and save "
                f"tensors and plain values"
            ) from error
        if not is_zip and isinstance(error, AttributeError):
            raise ForeignCheckpointError(
                f"{what} cannot be read: it has a dtype or a storage that torch does not read from its format before "
                f"1.6: save it without _use_new_zipfile_serialization=False"
            ) from error
        raise ForeignCheckpointError(f"{what} cannot be read: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = _COLOR.sub("", str(error))
    reason = _REASON.search(text)
    return (reason[1] if reason else (text.splitlines() or [""])[0]).partition(_ADVICE)[0][:300]


def _other_classes(opened: Any) -> list[str]:
    with opened() as file, plain_values():
        try:
            return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        except _UNREADABLE:
            return []


def save_pickled(value: Any, path: Path, places: Sequence[torch.Tensor], fill: Callable[[int], torch.Tensor]) -> None:
    """Write a new file of torch.save. After an error it is absent.

    Args:
        value: the value.
        path: the new file.
        places: tensors in ``value`` without data yet.
        fill: returns the data of the tensor of that number, when it is written.
    """
    numbers = {place.untyped_storage()._cdata: number for number, place in enumerate(places)}  # noqa: SLF001
    with finished_output(path) as temporary, torch.serialization._open_zipfile_writer(str(temporary)) as writer:  # noqa: SLF001
        records = _Records(writer, numbers, fill)
        torch.serialization._save(value, records, _ExactPickle, PROTOCOL, False)  # type: ignore[no-untyped-call]  # noqa: SLF001


class _Records:
    """Writes the records of a file of torch.save. The data of a tensor is there only while its record is written."""

    def __init__(self, writer: Any, numbers: Mapping[int, int], fill: Callable[[int], torch.Tensor]) -> None:
        self._writer = writer
        self._numbers = numbers
        self._fill = fill

    def write_record(self, name: str, data: Any, size: int) -> None:
        """Write one record, as ``torch.PyTorchFileWriter`` does."""
        number = self._numbers.get(data._cdata) if isinstance(data, torch.UntypedStorage) else None  # noqa: SLF001
        self._writer.write_record(name, data if number is None else self._fill(number).untyped_storage(), size)


def write_pickled(value: Any, file: IO[bytes], what: str) -> None:
    """Append a value to a file, as torch.save writes it. A tensor is written with all of its storage.

    Args:
        value: the value.
        file: the file.
        what: name of the value, for errors.

    Raises:
        CannotHold: torch.save cannot write the value.
    """
    try:
        torch.save(value, file, pickle_module=_ExactPickle)
    except OSError:
        raise
    except (*_UNREADABLE, pickle.PicklingError, RecursionError) as error:
        raise CannotHold(
            f"{what} cannot be written as torch.save does ({type(error).__name__}: {_first_line(error)}): convert it "
            f"to tensors, numbers, strings, dicts, lists or tuples"
        ) from error


def is_surely_plain(value: Any) -> bool:
    """Return whether ``load_pickled`` surely reads a value that was written. False: only a load can tell.

    True if it is a tree, of at most 50 levels, of lists, tuples, dicts, and sets, with numbers, strings, dense tensors,
    and buffers.
    """
    seen = set[int]()
    rest = [(value, 0)]
    while rest:
        one, depth = rest.pop()
        kind = type(one)
        if kind in _CONTAINERS:
            if id(one) in seen or depth == _SURE_DEPTH:
                return False
            if one:  # empty tuples are one object
                seen.add(id(one))
            rest += [(item, depth + 1) for item in ((*one, *one.values()) if kind is dict else one)]
        elif kind is int:
            if one.bit_length() >= _SURE_BITS:
                return False
        elif kind in (torch.Tensor, torch.nn.Parameter):
            if one.layout is not torch.strided or one.dtype not in _STORAGES or one.is_meta or vars(one):
                return False
        elif kind is io.BytesIO:
            if vars(one):
                return False
        elif kind not in _SCALARS:
            return False
    return True


def _full_state(value: Any) -> Any:
    """Return how pickle makes a time again, with its fold, which older protocols leave out."""
    return value.__reduce_ex__(4)


class _ExactPickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {datetime: _full_state, time: _full_state}


class _ExactPickle:
    """Takes the place of the module pickle in torch.save."""

    Pickler = _ExactPickler


def pickled_metadata(metadata: Metadata) -> bytes:
    """Return the bytes of a ``.metadata`` file of torch.distributed.checkpoint."""
    return pickle.dumps(metadata)


def check_sums(file: IO[bytes], what: str) -> bool:
    """Compare the check sums of a file of torch.save, which torch.load ignores. Return whether the file has any.

    Raises:
        ForeignCheckpointError: a byte differs.
    """
    try:
        if not zipfile.is_zipfile(file):
            return False
        file.seek(0)
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            bad = archive.testzip()
    except BAD_ZIP as error:
        raise ForeignCheckpointError(f"{what} is damaged: {error}") from error
    if bad is not None:
        raise ForeignCheckpointError(
            f"{what} is damaged: part {bad} differs from its check sum (or was saved with "
            f"torch.serialization.set_crc32_options(False))"
        )
    kind = next((kind for end, kind in _ARCHIVES.items() if any(name.endswith(end) for name in names)), "")
    if kind or not any(name.endswith("/data.pkl") for name in names):
        kind = kind or "a zip file without data.pkl"
        raise ForeignCheckpointError(
            f"{what} is {kind}, and no file of torch.save: save a state_dict() with torch.save"
        )
    return True


@dataclass(frozen=True)
class _Storage:
    identity: tuple[Any, ...]


@dataclass(frozen=True)
class _Tensor:
    arguments: tuple[Any, ...]

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return torch._utils._rebuild_tensor_v2, self.arguments  # noqa: SLF001  the name in the pickle


class _Pickler(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        return value.identity if isinstance(value, _Storage) else None


@lru_cache(maxsize=4096)
def pickle_of_plain(dtype: torch.dtype, shape: Sizes) -> bytes:
    """Return the pickle that torch.save writes for a plain tensor; empty: it writes another kind of pickle."""
    kind = _STORAGES.get(dtype)
    if kind is None:
        return b""
    storage = _Storage(("storage", kind, "0", "cpu", math.prod(shape)))
    strides = torch.empty(shape, device="meta").stride()
    found = io.BytesIO()
    _Pickler(found, _PROTOCOL).dump(_Tensor((storage, 0, shape, strides, False, OrderedDict())))
    return found.getvalue()
