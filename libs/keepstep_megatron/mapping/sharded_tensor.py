"""One part of a tensor of all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Self, TypeAlias

import numpy as np
import torch

from keepstep.state.values.tensor_subclasses import refusal
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping.sharded_base import ReplicaId, ShardedBase

Coordinates: TypeAlias = "tuple[np.ndarray[Any, np.dtype[np.intp]], ...]"


@dataclass
class ShardedTensor(ShardedBase):
    """One part of a global tensor: a box of it, or a range of the elements of that box.

    ``from_rank_offsets`` computes the shapes and offsets from the position of a rank along each axis.

    Args:
        key: name of the global tensor, equal on all ranks.
        data: the local part; None: only the description is needed.
        dtype: of the tensor.
        local_shape: shape of the box, without prepended axes.
        global_shape: shape of the global tensor, with prepended axes.
        global_offset: first element of the box in the global tensor, with prepended axes.
        axis_fragmentations: number of equal boxes along each axis; None: boxes of different sizes.
        replica_id: which copy of the part this rank has; see ``is_main_replica``.
        prepend_axis_num: number of axes that the global tensor has before those of ``data``. The box has size 1 along
            them.
        allow_shape_mismatch: a load accepts a stored tensor of another global shape: it copies the elements that
            both have, and sets the others to 0. For padded tensors, such as a vocabulary.
        flattened_range: ``data`` is this range of the flattened box; None: the box.

    Raises:
        CheckpointingException: the fields do not fit each other.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    replica_id: ReplicaId = 0
    prepend_axis_num: int = 0
    allow_shape_mismatch: bool = False
    flattened_range: slice | None = None

    def __post_init__(self) -> None:
        self.local_shape = tuple(self.local_shape)
        self.global_shape = tuple(self.global_shape)
        self.global_offset = tuple(self.global_offset)
        if self.axis_fragmentations is not None:
            self.axis_fragmentations = tuple(self.axis_fragmentations)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        """Check that the fields fit each other. Raises ``CheckpointingException``."""
        axes = len(self.local_shape) + self.prepend_axis_num
        if len(self.global_shape) != axes or len(self.global_offset) != axes:
            self._refuse(
                f"has local_shape {self.local_shape}, prepend_axis_num {self.prepend_axis_num}, global_shape "
                f"{self.global_shape} and global_offset {self.global_offset}: expected {axes} axes in the last two"
            )
        if self.axis_fragmentations is not None:
            if len(self.axis_fragmentations) != axes:
                self._refuse(f"has axis_fragmentations {self.axis_fragmentations}: expected {axes} axes, or None")
            self._check_grid()
        for axis, (offset, size, whole) in enumerate(
            zip(self.global_offset, self.box_shape, self.global_shape, strict=True)
        ):
            if offset < 0 or size < 0 or offset + size > whole:
                self._refuse(
                    f"has elements {offset} to {offset + size} of axis {axis}, outside of its global size {whole}"
                )
        self._check_range()
        if self.data is not None:
            self._check_data(self.data)

    def _check_grid(self) -> None:
        for axis, (offset, size) in enumerate(zip(self.global_offset, self.box_shape, strict=True)):
            if size and offset % size:
                hint = ": pass axis_fragmentations=None for parts of different sizes" if self.has_regular_grid else ""
                self._refuse(
                    f"has offset {offset} along axis {axis}, which is not a multiple of the local size {size}{hint}"
                )

    def _check_range(self) -> None:
        part = self.flattened_range
        if part is None:
            return
        count = math.prod(self.local_shape)
        if part.step is not None or type(part.start) is not int or type(part.stop) is not int:
            self._refuse(f"has flattened_range {part}: expected slice(start, stop) without a step")
        if not 0 <= part.start <= part.stop <= count:
            self._refuse(f"has flattened_range {part}: expected a range of the {count} elements of {self.local_shape}")

    def _check_data(self, data: torch.Tensor) -> None:
        if data.dtype != self.dtype:
            self._refuse(f"has data of dtype {data.dtype}, but dtype {self.dtype}: expected equal dtypes")
        if tuple(data.shape) != self.data_shape:
            self._refuse(f"has data of shape {tuple(data.shape)}: expected {self.data_shape}")

    def _refuse(self, problem: str) -> NoReturn:
        raise CheckpointingException(f"ShardedTensor {self.key!r} {problem}")

    @property
    def has_regular_grid(self) -> bool:
        """Whether all parts of the global tensor have the same shape."""
        return self.axis_fragmentations is not None

    @property
    def box_shape(self) -> tuple[int, ...]:
        """Shape of the box in the global tensor, with prepended axes."""
        return (1,) * self.prepend_axis_num + self.local_shape

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Shape of ``data``: ``local_shape``, or one axis if ``flattened_range`` is set."""
        if self.flattened_range is None:
            return self.local_shape
        return (self.flattened_range.stop - self.flattened_range.start,)

    @property
    def nbytes(self) -> int:
        """Size of ``data`` in bytes, also if it is None."""
        return math.prod(self.data_shape) * self.dtype.itemsize

    def global_slice(self) -> tuple[int | slice, ...]:
        """Return the index of the box in the global tensor: an integer for each prepended axis, a slice for others."""
        prepended, offsets = self.global_offset[: self.prepend_axis_num], self.global_offset[self.prepend_axis_num :]
        return (*prepended, *(slice(at, at + size) for at, size in zip(offsets, self.local_shape, strict=True)))

    def local_coordinates(self) -> Coordinates:
        """Return the indices of the elements of ``data`` in the box, one array for each axis of ``local_shape``.

        Raises:
            CheckpointingException: ``flattened_range`` is None.
        """
        if self.flattened_range is None:
            self._refuse("has no flattened_range: coordinates exist only for a range; use global_slice()")
        elements = np.arange(self.flattened_range.start, self.flattened_range.stop)
        return np.unravel_index(elements, self.local_shape) if self.local_shape else ()

    def global_coordinates(self) -> Coordinates:
        """Return the indices of the elements of ``data`` in the global tensor, one array for each of its axes.

        Raises:
            CheckpointingException: ``flattened_range`` is None.
        """
        local = self.local_coordinates()
        prepended = [np.zeros(self.data_shape, np.intp) for _ in range(self.prepend_axis_num)]
        return tuple(indices + at for indices, at in zip((*prepended, *local), self.global_offset, strict=True))

    def local_chunk_offset_in_global(self) -> tuple[int, ...]:
        """Return the position of the box among the boxes of its shape, along each axis of the global tensor.

        Raises:
            CheckpointingException: the offset is not a multiple of the shape.
        """
        self._check_grid()
        sizes = zip(self.global_offset, self.box_shape, strict=True)
        return tuple(offset // size if size else 0 for offset, size in sizes)

    def max_allowed_chunks(self) -> tuple[int, ...]:
        """Return the size of a box along each axis of the global tensor, if ``axis_fragmentations`` cut it evenly.

        Raises:
            CheckpointingException: ``axis_fragmentations`` is None; or an axis is not cut evenly, and
                ``allow_shape_mismatch`` is False.
        """
        if self.axis_fragmentations is None:
            self._refuse("has axis_fragmentations None, so its parts have no common size")
        for axis, (size, fragments) in enumerate(zip(self.global_shape, self.axis_fragmentations, strict=True)):
            if size % fragments and not self.allow_shape_mismatch:
                self._refuse(f"has global size {size} along axis {axis}, which {fragments} parts do not cut evenly")
        return tuple(
            size // fragments for size, fragments in zip(self.global_shape, self.axis_fragmentations, strict=True)
        )

    def without_data(self) -> Self:
        """Return a copy with ``data=None``."""
        return replace(self, data=None)

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: torch.Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: ReplicaId = 0,
        prepend_axis_num: int = 0,
        allow_shape_mismatch: bool = False,
        flattened_range: None = None,
    ) -> Self:
        """Return the part of a tensor that is cut into equal parts.

        Args:
            key: name of the global tensor, equal on all ranks.
            data: the local part.
            rank_offsets: ``(axis, position, fragments)``: along ``axis``, the global tensor has ``fragments`` parts,
                and ``data`` is number ``position`` of them. Axes include the prepended ones. Along an axis that is
                not named, ``data`` is whole.
            replica_id: which copy of the part this rank has.
            prepend_axis_num: number of axes that the global tensor has before those of ``data``.
            allow_shape_mismatch: see ``ShardedTensor``.
            flattened_range: must be None; see ``from_rank_offsets_flat``.

        Raises:
            CheckpointingException: a rank offset is invalid.
            UnsupportedValue: ``data`` is nested.
            ValueError: ``flattened_range`` is not None.
        """
        if flattened_range is not None:
            raise ValueError(
                f"ShardedTensor {key!r}: from_rank_offsets has flattened_range {flattened_range}: call "
                f"from_rank_offsets_flat instead"
            )
        if data.is_nested:
            raise refusal(data, f"ShardedTensor {key!r}")
        box = [1] * prepend_axis_num + list(data.shape)
        fragmentations, position = [1] * len(box), [0] * len(box)
        named = set[int]()
        for offsets in rank_offsets:
            axis, at, fragments = offsets
            if axis in named or not 0 <= axis < len(box) or not 0 <= at < fragments:
                raise CheckpointingException(
                    f"ShardedTensor {key!r} has invalid rank offset {tuple(offsets)}: expected (axis, position, "
                    f"fragments) with 0 <= axis < {len(box)}, 0 <= position < fragments, each axis once"
                )
            named.add(axis)
            position[axis], fragmentations[axis] = at, fragments
        return cls(
            key,
            data,
            data.dtype,
            tuple(data.shape),
            _product(box, fragmentations),
            _product(box, position),
            tuple(fragmentations),
            replica_id,
            prepend_axis_num,
            allow_shape_mismatch,
        )

    @classmethod
    def from_rank_offsets_flat(
        cls,
        key: str,
        data: torch.Tensor,
        non_flat_local_shape: tuple[int, ...],
        *args: tuple[int, int, int],
        flattened_range: slice | None = None,
        **kwargs: Any,
    ) -> Self:
        """Return a range of the elements of a part of a tensor that is cut into equal parts.

        Args:
            key: name of the global tensor, equal on all ranks.
            data: the elements, with one axis.
            non_flat_local_shape: shape of the part before it was flattened.
            args: see ``rank_offsets`` of ``from_rank_offsets``.
            flattened_range: the range of the flattened part that ``data`` is.
            kwargs: see ``from_rank_offsets``.

        Raises:
            CheckpointingException: ``flattened_range`` is None, or does not fit ``data`` and the shape.
        """
        if flattened_range is None:
            raise CheckpointingException(
                f"ShardedTensor {key!r}: from_rank_offsets_flat has no flattened_range: pass a slice, or call "
                f"from_rank_offsets"
            )
        whole = torch.empty(non_flat_local_shape, dtype=data.dtype, device="meta")
        described = cls.from_rank_offsets(key, whole, *args, **kwargs)
        return replace(described, data=data, flattened_range=flattened_range)

    def init_data(self, device: torch.device | str | None, init_fn: Callable[..., torch.Tensor] = torch.empty) -> None:
        """Set ``data`` to a new tensor if it is None.

        Args:
            device: of the new tensor.
            init_fn: called as ``init_fn(shape, dtype=..., device=...)`` with the shape of ``data``.
        """
        if self.data is None:
            self.data = init_fn(self.data_shape, dtype=self.dtype, device=device)

    def narrow(self, dim: int, start: int, length: int) -> list[Self]:
        """Return the part as if every rank narrowed its box in this way (compare ``torch.narrow``).

        Args:
            dim: axis of ``local_shape``. With ``flattened_range``, only 0.
            start: first element along the axis.
            length: number of elements along the axis.

        Returns:
            One tensor; or none, if ``flattened_range`` is set and has no element of the narrowed box.

        Raises:
            CheckpointingException: the arguments do not fit the box, or boxes have different sizes along the axis.
        """
        if not 0 <= dim < len(self.local_shape) or start < 0 or length < 0 or start + length > self.local_shape[dim]:
            self._refuse(f"has local_shape {self.local_shape}: cannot narrow axis {dim} to {length} from {start}")
        axis, size = dim + self.prepend_axis_num, self.local_shape[dim]
        if size and (self.global_shape[axis] % size or self.global_offset[axis] % size):
            self._refuse(f"cannot be narrowed along axis {dim}: its parts have different sizes along it")
        smaller: dict[str, Any] = {
            "local_shape": _with(self.local_shape, dim, length),
            "global_shape": _with(self.global_shape, axis, self.global_shape[axis] // max(size, 1) * length),
            "global_offset": _with(self.global_offset, axis, self.global_offset[axis] // max(size, 1) * length),
        }
        if self.flattened_range is None:
            data = None if self.data is None else self.data.narrow(dim, start, length)
            return [replace(self, data=data, **smaller)]
        if dim:
            self._refuse(f"has a flattened_range, so it can be narrowed along axis 0 only, not {dim}")
        row = math.prod(self.local_shape[1:])
        first = max(self.flattened_range.start, start * row)
        last = min(self.flattened_range.stop, (start + length) * row)
        if first >= last:
            return []
        data = None if self.data is None else self.data[first - self.flattened_range.start :][: last - first]
        return [replace(self, data=data, flattened_range=slice(first - start * row, last - start * row), **smaller)]


def _product(sizes: Sequence[int], factors: Sequence[int]) -> tuple[int, ...]:
    return tuple(size * factor for size, factor in zip(sizes, factors, strict=True))


def _with(sizes: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    return (*sizes[:axis], size, *sizes[axis + 1 :])
