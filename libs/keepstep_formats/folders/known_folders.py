"""The program that wrote a folder or a file, by its names and first bytes; and why some are not read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from keepstep_formats.dcp_metadata import METADATA
from keepstep_formats.folders.safetensors_folders import has_safetensors
from keepstep_formats.foreign_errors import ForeignCheckpointError, RefusedClass
from keepstep_formats.pickled_items import load_pickled
from keepstep_formats.safetensors_files import LENGTH_BYTES, SUFFIX, is_safetensors
from keepstep_mesh.text import listed

MAX_NAMED = 5
COMPANIONS = ("common.pt", "meta.pt")
"""Files of torch.save beside ``.metadata``, with the values that are not sharded: of Megatron Core, of Lightning."""
_DEEPSPEED = "DeepSpeed wrote it: run its zero_to_fp32.py, and import the file that it writes"
_FOLDERS = {
    ("checkpoint.json",): (
        "it is a checkpoint of keepstep already: load it with keepstep.checkpoint.load, or copy the folder"
    ),
    ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"): (
        "Orbax wrote it: load it with orbax.checkpoint, and write its arrays with safetensors.flax.save_file"
    ),
    ("__*.metadata",): (
        "dcp.save(..., use_collectives=False) wrote it, with a description for each rank: save it with collectives"
    ),
    ("zero",): "it is a universal checkpoint of DeepSpeed: load it with DeepSpeed, and save the state_dict()",
    ("zero_to_fp32.py", "*zero_pp_rank_*", "mp_rank_*_model_states.pt"): _DEEPSPEED,
    ("iter_*_local.pt",): (
        "nvidia-resiliency-ext wrote it, with the part of each rank: load it there, and save it as a checkpoint that "
        "is not local"
    ),
    ("common.pt",): (
        "Megatron Core wrote it as zarr, or did not finish: load it with keepstep.sharded.load, and save it"
    ),
    ("*.bin.index.json",): (
        "its weights are several files of torch.save: convert them with save_pretrained(), which writes safetensors"
    ),
}
"""Why a folder is not read, by patterns of names that only its program writes."""
_TRAINING = (
    *("optimizer*", "scheduler.*", "random_states_*", "rng_state*", "custom_checkpoint_*", "sampler*.bin"),
    *("zero_to_fp32.py", "global_step*"),
)
"""Names of a training state that Accelerate, Transformers and DeepSpeed write beside the weights."""
_LOADABLE = ("*.pt", "*.pth", "*.bin", "*.ckpt", "*.pkl", f"*{SUFFIX}")
_ITEM = re.compile(r"(.+)_(\d+)\.pt")
"""File of torch_checkpointing: a key of the state, and the rank."""
_FILES = {
    b"GGUF": "a GGUF file, with quantized weights of llama.cpp",
    b"\x89HDF": "an HDF5 file, as Keras writes it",
    b"\x93NUMPY": "an array of numpy",
}
_PARTS_OF_SEVERAL = re.compile(r".*-(\d+)-of-(\d+)\.(bin|pt|pth)")


def format_of(path: Path) -> str:
    """Return ``dcp``, ``safetensors`` or ``torch``: the format of a file, or of the files in a folder.

    Raises:
        ForeignCheckpointError: it is not found, or its format is not read; the error says what to do.
    """
    if not path.exists():
        raise ForeignCheckpointError(f"{path} not found")
    return _of_folder(path) if path.is_dir() else _of_file(path)


def _of_folder(folder: Path) -> str:
    names = {one.name for one in folder.iterdir()}
    if METADATA in names:
        return "dcp"
    if has_safetensors(folder):
        others = _matching(names, _TRAINING)
        if others:
            raise ForeignCheckpointError(
                f"{folder} has {listed(others, MAX_NAMED)} beside the weights, and an import reads one of them at a "
                f"time: give the file, or --format safetensors for the weights alone"
            )
        return "safetensors"
    for patterns, reason in _FOLDERS.items():
        if _matching(names, patterns):
            raise ForeignCheckpointError(f"{folder} is not read: {reason}")
    if _items(names):
        return "torch"
    if any(name.endswith(".distcp") for name in names):
        return "dcp"  # its reader says that the save did not finish
    inner = [f"{name}/" for name in sorted(names) if (folder / name).is_dir()]
    found = [*_matching(names, _LOADABLE), *inner]
    raise ForeignCheckpointError(
        f"{folder} is not a checkpoint: {METADATA} not found, nor an index of safetensors"
        + (f"; give one of {listed(found, MAX_NAMED)}" if found else "")
    )


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    return sorted(name for name in names if any(fnmatchcase(name, one) for one in patterns))


def _of_file(path: Path) -> str:
    with path.open("rb") as file:
        start = file.read(LENGTH_BYTES + 1)
    if path.suffix in (".json", SUFFIX) or is_safetensors(start):
        return "safetensors"
    for magic, what in _FILES.items():
        if start.startswith(magic):
            raise ForeignCheckpointError(f"{path} is {what}, which is not read: convert it to safetensors")
    several = _PARTS_OF_SEVERAL.fullmatch(path.name)
    if several and int(several[2]) > 1:
        raise ForeignCheckpointError(
            f"{path} is one of {int(several[2])} files: convert them with save_pretrained(), which writes safetensors"
        )
    if "zero_pp_rank_" in path.name or len(_matching(_names_beside(path), ["mp_rank_*_model_states.pt"])) > 1:
        raise ForeignCheckpointError(f"{path} has the part of one rank: {_DEEPSPEED}")
    return "torch"


def _names_beside(path: Path) -> list[str]:
    is_of_deepspeed = fnmatchcase(path.name, "mp_rank_*_model_states.pt")
    return [one.name for one in path.parent.iterdir()] if is_of_deepspeed else []


def _items(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the ranks of each item, if all files are items of torch_checkpointing."""
    found: dict[str, set[int]] = {}
    for name in names:
        match = _ITEM.fullmatch(name)
        if match is None and name != "metadata.pkl":
            return {}
        if match is not None:
            found.setdefault(match[1], set()).add(int(match[2]))
    return found


def read_items(folder: Path, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Return the state in a folder of torch_checkpointing, with a file for each of its keys.

    Raises:
        ForeignCheckpointError: several ranks wrote it: what their parts are is in a pickle of classes.
        RefusedClass: a file has objects of classes, such as DTensor.
    """
    items = _items(one.name for one in folder.iterdir())
    if not items:
        raise ForeignCheckpointError(f"{folder} is a folder without files of torch_checkpointing: give a file of it")
    several = sorted(key for key, ranks in items.items() if ranks != {0})
    if several:
        raise ForeignCheckpointError(
            f"{folder} is not read: torch_checkpointing wrote it on several ranks ({listed(several, MAX_NAMED)}). Load "
            f"it with CheckpointManager.load, and save it with keepstep.checkpoint.save"
        )
    files = {key: folder / f"{key}_0.pt" for key in sorted(items)}
    return {key: load_pickled(path, str(path), allow_pickle=allow_pickle) for key, path in files.items()}


def with_companions(state: Mapping[str, Any], folder: Path, skip_objects: list[str] | None) -> dict[str, Any]:
    """Return the state of a directory of DCP, with the values in files of torch.save beside it.

    Args:
        state: the sharded values.
        folder: the directory.
        skip_objects: receives the name of a file that cannot be read without running code. None: it is an error.

    Raises:
        RefusedClass: such a file has objects of classes.
        ForeignCheckpointError: a file is damaged, or has a key that the directory has too.
    """
    whole = dict(state)
    for path in [folder / name for name in COMPANIONS if (folder / name).is_file()]:
        try:
            values = load_pickled(path, str(path))
        except RefusedClass as error:
            if skip_objects is None:
                raise RefusedClass(f"{error}. --skip-objects leaves out {path.name}.") from error
            skip_objects.append(path.name)
            continue
        if not isinstance(values, Mapping):
            raise ForeignCheckpointError(f"{path} has a {type(values).__name__}, expected a dict")
        twice = sorted(map(str, values.keys() & whole.keys()))
        if twice:
            raise ForeignCheckpointError(f"{path} and {METADATA} both have {listed(twice, MAX_NAMED)}")
        whole |= values
    return whole
