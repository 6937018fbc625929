"""Files of one checkpoint in the safetensors format: which they are, and whether they are all of it.

A folder of Hugging Face has one file, or several with an index. DCP's ``HuggingFaceStorageWriter`` writes such folders
too; without consolidation it writes files with the part of each rank, ``shard-00002-model-00001-of-00001.safetensors``,
and no index. Their headers say where each part lies in its tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keepstep.state.pack import Unread
from keepstep_formats.dcp_directory import DcpDirectory
from keepstep_formats.dcp_metadata import ByteRange, DcpContent, ForeignTensor
from keepstep_formats.foreign_errors import ForeignCheckpointError
from keepstep_formats.safetensors_files import INDEX, SUFFIX, Header, Report, read_header, read_safetensors
from keepstep_mesh.protocol.boxes import Box, Sizes, uncovered
from keepstep_mesh.text import listed

MAX_NAMED = 5
SINGLE = "model.safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_OF_RANK = re.compile(r"shard-(\d+)-.*-\d+-of-\d+\.safetensors")
"""File with the part of one rank, as DCP names it. Ranks are counted from 1."""
_OF_SEVERAL = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_PARTS = "sharded"
"""Folder of the parts, beside the files that DCP joins from them."""
_CONSOLIDATE = (
    "save with HuggingFaceStorageWriter(..., save_distributed=True, enable_consolidation=True), or call "
    "torch.distributed.checkpoint._consolidate_hf_safetensors.consolidate_safetensors_files"
)
_OVERWRITTEN = (
    "with HuggingFaceStorageWriter(..., save_distributed=False), each rank replaces the file of the others; save with "
    "save_distributed=True"
)


@dataclass(frozen=True)
class SafetensorsFiles:
    """The files of a checkpoint.

    Attributes:
        source: what names them, for errors.
        paths: the files.
        where: name of the file of each tensor, if an index says it.
        total_bytes: bytes of all tensors, if an index says it.
        are_parts: whether each file has the part of one rank.
        joined: files that DCP joined from these parts. Torch 2.13 writes zeros for the values of 0-dim tensors there.
    """

    source: Path
    paths: list[Path]
    where: dict[str, str] | None = None
    total_bytes: Any = None
    are_parts: bool = False
    joined: SafetensorsFiles | None = None


def has_safetensors(folder: Path) -> bool:
    """Return whether a folder has files of this format, or parts of them."""
    return any(folder.glob(f"*{SUFFIX}*")) or _has_parts(folder)


def _has_parts(folder: Path) -> bool:
    return any(_OF_RANK.fullmatch(one.name) for one in (folder / _PARTS).glob(f"*{SUFFIX}"))


def find_safetensors(source: Path) -> SafetensorsFiles:
    """Return the files of ``source``: a file, an index, or a folder.

    Raises:
        ForeignCheckpointError: ``source`` is a part of a checkpoint, an index is invalid, or a file is missing.
    """
    if source.is_dir():
        return _in_folder(source)
    if source.suffix == ".json":
        return _indexed(source)
    if _OF_RANK.fullmatch(source.name):
        raise ForeignCheckpointError(f"{source} has the part of one rank: give its folder, {source.parent}")
    part = _OF_SEVERAL.fullmatch(source.name)
    if part and int(part[3]) > 1:
        raise ForeignCheckpointError(f"{source} is one of {int(part[3])} files: give its folder, {source.parent}")
    return SafetensorsFiles(source, [source])


def _in_folder(folder: Path) -> SafetensorsFiles:
    names = sorted(one.name for one in folder.iterdir() if one.is_file())
    indices = [name for name in names if name.endswith(_INDEX_SUFFIX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    parts = folder / _PARTS
    if INDEX in names:
        found = _indexed(folder / INDEX)
        return replace(_in_folder(parts), joined=found) if _has_parts(folder) else found
    if SINGLE in names:
        return SafetensorsFiles(folder, [folder / SINGLE])
    if len(indices) == 1:
        return _indexed(folder / indices[0])
    paths = [folder / name for name in files]
    ranks = [int(match[1]) for match in map(_OF_RANK.fullmatch, files) if match]
    if files and len(ranks) == len(files):
        _check_ranks(folder, set(ranks))
        return SafetensorsFiles(folder, paths, are_parts=True)
    if _has_parts(folder):
        raise ForeignCheckpointError(f"{folder} has no {INDEX}: its consolidation did not end; give {parts}")
    several = [match for match in map(_OF_SEVERAL.fullmatch, files) if match]
    if files and not indices and len(several) == len(files) and len({(one[1], one[3]) for one in several}) == 1:
        count = int(several[0][3])
        if len(files) != count:
            raise ForeignCheckpointError(f"{folder} is incomplete: it has {len(files)} of {count} files")
        return SafetensorsFiles(folder, paths)
    if len(files) == 1:
        return SafetensorsFiles(folder, paths)
    raise ForeignCheckpointError(
        f"{folder} has several checkpoints: give one of {listed(indices or files, MAX_NAMED)}"
        if files
        else f"{folder} has no safetensors files"
    )


def _check_ranks(folder: Path, ranks: set[int]) -> None:
    missing = sorted(set(range(1, max(ranks) + 1)) - ranks)
    if missing:
        raise ForeignCheckpointError(
            f"{folder} is incomplete: it has files of ranks up to {max(ranks)}, and none of "
            f"{listed([f'shard-{number:05}-*' for number in missing], MAX_NAMED)}. If these ranks had nothing to save, "
            f"consolidate first: {_CONSOLIDATE}"
        )


def _indexed(index: Path) -> SafetensorsFiles:
    try:
        content = json.loads(index.read_text())
        where = dict(content["weight_map"])
        total = content.get("metadata", {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ForeignCheckpointError(f"{index} is not a valid index of safetensors files: {error!r}") from error
    bad = [name for name in where.values() if type(name) is not str or Path(name).name != name]
    if bad:
        raise ForeignCheckpointError(f"{index} names {str(bad[0])[:200]!r}, which is not a file beside it")
    return SafetensorsFiles(index, [index.parent / name for name in sorted(set(where.values()))], where, total)


def read_safetensors_files(files: SafetensorsFiles, report: Report = lambda _: None) -> tuple[dict[str, Any], Unread]:
    """Return all tensors of a checkpoint.

    Returns:
        The tensors, and ``unread`` as ``DcpDirectory`` has it: functions that join the parts of tensors.

    Raises:
        ForeignCheckpointError: a file is missing or damaged, or the files are not all of the checkpoint.
    """
    headers = {path: read_header(path) for path in files.paths}
    if files.are_parts:
        content = _joined(files.source, headers)
        if files.joined is not None:
            _check_joined(files.source, files.joined, content)
        directory = DcpDirectory(files.source, content, report=report)
        return directory.state, directory.unread
    _check_whole(files, headers)
    return dict(read_safetensors(headers, report)), {}


def _check_whole(files: SafetensorsFiles, headers: Mapping[Path, Header]) -> None:
    """Raise ``ForeignCheckpointError`` if a file has a part of a tensor, or other tensors than the index says."""
    found: dict[str, str] = {}
    for path, header in headers.items():
        for key, offset in (header.offsets or {}).items():
            if any(offset):
                raise ForeignCheckpointError(f"{path} has only a part of {key}, at {list(offset)}: {_OVERWRITTEN}")
        for key in header.tensors:
            if key in found:
                raise ForeignCheckpointError(f"{key} is in {path} and in another file")
            found[key] = path.name
    if files.where is None:
        return
    for what, known, other in (("the index", files.where, found), ("the files", found, files.where)):
        wrong = [f"{key} is in {name}" for key, name in known.items() if other.get(key) != name]
        if wrong:
            raise ForeignCheckpointError(
                f"{files.source} does not fit its files: by {what}, {listed(wrong, MAX_NAMED)}; use files of one save"
            )
    nbytes = sum(stored.nbytes for header in headers.values() for stored in header.tensors.values())
    is_of_dcp = any(header.offsets is not None for header in headers.values())  # the sums of others may be wrong
    if is_of_dcp and files.total_bytes != nbytes:
        raise ForeignCheckpointError(
            f"{files.source} has {files.total_bytes} bytes of tensors, its files have {nbytes}: {_OVERWRITTEN}"
        )


def _joined(folder: Path, headers: Mapping[Path, Header]) -> DcpContent:
    """Return the tensors of the files of all ranks."""
    dtypes: dict[str, torch.dtype] = {}
    shapes: dict[str, Sizes] = {}
    shards: dict[str, dict[Box, ByteRange]] = {}
    for path, header in headers.items():
        if header.offsets is None:
            raise ForeignCheckpointError(f"{path} does not say which part of each tensor it has (no DCP_SHARDING_INFO)")
        for key, stored in header.tensors.items():
            box, of_key = Box(header.offsets[key], stored.shape), shards.setdefault(key, {})
            end = tuple(start + size for start, size in zip(box.offset, box.shape, strict=True))
            known = shapes.setdefault(key, end)
            if dtypes.setdefault(key, stored.dtype) != stored.dtype or len(known) != len(end):
                raise ForeignCheckpointError(f"{path} has another dtype or number of dimensions of {key} than others")
            if box in of_key and box.volume:
                raise ForeignCheckpointError(f"{path} and {of_key[box].file} have the same part of {key}, {box}")
            of_key[box] = ByteRange(path.name, 0, stored.nbytes)
            shapes[key] = tuple(map(max, known, end))
    for key, of_key in shards.items():
        if problem := uncovered(shapes[key], list(of_key)):
            raise ForeignCheckpointError(f"{folder} is incomplete: {key}: {problem}")
    tensors = {key: ForeignTensor(dtypes[key], shapes[key], of_key) for key, of_key in shards.items()}
    return DcpContent(tensors, {}, {key: (key,) for key in tensors})


def _check_joined(folder: Path, files: SafetensorsFiles, parts: DcpContent) -> None:
    """Raise ``ForeignCheckpointError`` if joined files have other tensors than their parts, such as longer ones."""
    joined: dict[str, Sizes] = {}
    for path in files.paths:
        try:
            joined |= {key: stored.shape for key, stored in read_header(path).tensors.items()}
        except ForeignCheckpointError as error:
            raise ForeignCheckpointError(f"{error}; give {folder}, from which torch made the file") from error
    shapes = {key: tensor.shape for key, tensor in parts.tensors.items()}
    wrong = [f"{key} {shapes.get(key)}" for key in joined.keys() | shapes if joined.get(key) != shapes.get(key)]
    if wrong:
        raise ForeignCheckpointError(
            f"{folder} is incomplete: its parts make {listed(sorted(wrong), MAX_NAMED)}, other than in {files.source}"
        )
