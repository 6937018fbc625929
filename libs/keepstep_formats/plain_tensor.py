"""Reading of a tensor that torch.save wrote, straight into the memory that wants it.

torch.load allocates the tensor, copies it, and ignores check sums. Most tensors are plain: contiguous, on the CPU, and
the whole of their storage. Then dtype and shape determine the pickle of the file, and the rest of it are the bytes of
the tensor, with their check sum.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from typing import IO, Any

import torch

from keepstep_formats.pickled_items import BAD_ZIP, pickle_of_plain

MAX_ENTRY_BYTES = 1 << 16
"""Of an entry other than the bytes of the tensor."""
_LOCAL_HEADER = struct.Struct("<4s22xHH")
"""Of an entry of a zip file: signature, length of its name, length of its extra field. Then these, then the bytes."""
_SIGNATURE = b"PK\x03\x04"


def read_plain_tensor(file: IO[bytes], start: int, length: int, memory: torch.Tensor) -> bool:
    """Read a tensor with the dtype and shape of ``memory`` into it, and compare its check sum.

    Args:
        file: has the bytes that torch.save wrote.
        start: position of the first one.
        length: number of them.
        memory: contiguous, on the CPU.

    Returns:
        Whether it was read. False: the tensor is not plain, or damaged; ``memory`` may have changed.
    """
    part = _Part(file, start, length)
    try:
        with zipfile.ZipFile(part) as archive:
            entries = {one.filename.partition("/")[2]: one for one in archive.infolist()}
            data = entries.pop("data/0", None)
            if not all(_is_small(one) for one in entries.values()):
                return False
            small = {name: archive.read(one) for name, one in entries.items()}  # compares their check sums
    except BAD_ZIP:
        return False
    if (
        data is None
        or (data.compress_type, data.file_size) != (zipfile.ZIP_STORED, memory.nbytes)
        or small.get("byteorder") != b"little"
        or small.get("data.pkl") != pickle_of_plain(memory.dtype, tuple(memory.shape))
    ):
        return False
    part.seek(data.header_offset)
    header = part.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        return False
    signature, name, extra = _LOCAL_HEADER.unpack(header)
    part.seek(name + extra, io.SEEK_CUR)
    content: memoryview = memory.reshape(-1).view(torch.uint8).numpy().data
    return bool(signature == _SIGNATURE and part.readinto(content) == len(content) and zlib.crc32(content) == data.CRC)


def _is_small(entry: zipfile.ZipInfo) -> bool:
    return entry.compress_type == zipfile.ZIP_STORED and entry.file_size <= MAX_ENTRY_BYTES


class _Part(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file = file
        self._start = start
        self._length = length
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if self._position < 0:
            raise OSError(f"position {self._position} is before the part")
        return self._position

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._position)]
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(wanted)  # type: ignore[attr-defined]
        self._position += count
        return count
