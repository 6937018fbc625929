"""Folders and files of other programs are read, or refused with the reason and what to do.

The names of files are those that the program of the named version wrote, which was run once. Their content is written
here, except that of Megatron Core, of which the repository has folders.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from keepstep.checkpoint.interchange import ForeignCheckpointError, Format, RefusedClass, import_checkpoint
from keepstep.checkpointing import UnsupportedValue
from keepstep_formats.safetensors_files import write_safetensors
from tests.support import checkpoints
from tests.unit.keepstep_formats.checkpoint_files import files, stored
from tests.unit.keepstep_formats.states import equal, training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*torch.jit")

GOLDEN = Path(checkpoints.__file__).parent / "golden"
STATE = {"w": torch.arange(6.0).reshape(2, 3), "step": 3}


def imported(path: Path, tmp_path: Path, **how: Any) -> Any:
    import_checkpoint(path, tmp_path / "ours", **how)
    return stored(tmp_path / "ours")


def refused(path: Path, words: str, **how: Any) -> None:
    before = files(path.parent)
    with pytest.raises(ForeignCheckpointError, match=words):
        import_checkpoint(path, path.parent / "ours", **how)
    assert files(path.parent) == before


def folder(tmp_path: Path, names: str) -> Path:
    """Make empty files; folders end with a slash."""
    path = tmp_path / "theirs"
    for name in names.split():
        if name.endswith("/"):
            (path / name).mkdir(parents=True)
        else:
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).touch()
    return path


# ---- folders that are refused


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("checkpoint.json manifest-0 pack-0", "it is a checkpoint of keepstep already: load it with keepstep"),
        # Orbax 0.12.8: StandardCheckpointer, a step of CheckpointManager, PyTreeCheckpointer with zarr, v1
        (
            "_CHECKPOINT_METADATA _METADATA _sharding commit_success.txt d/89d8 manifest.ocdbt ocdbt.process_0/d/",
            r"Orbax wrote it: load it with orbax\.checkpoint",
        ),
        ("_CHECKPOINT_METADATA commit_success.txt default/_METADATA", "Orbax wrote it"),
        ("_CHECKPOINT_METADATA _METADATA _sharding params.w/.zarray step/.zarray", "Orbax wrote it"),
        ("_CHECKPOINT_METADATA commit_success.txt orbax.checkpoint state/_METADATA", "Orbax wrote it"),
        ("5/_CHECKPOINT_METADATA", r"is not a checkpoint: .*give one of 5/"),
        # DeepSpeed 0.19.8: without ZeRO, stages 1 and 3; the folders in it; a universal checkpoint
        ("global_step1/mp_rank_00_model_states.pt latest", r"give one of global_step1/"),
        ("zero_to_fp32.py zero_to_torch.py latest global_step1/", r"DeepSpeed wrote it: run its zero_to_fp32\.py"),
        ("bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt mp_rank_00_model_states.pt", "DeepSpeed wrote it"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "DeepSpeed wrote it"),
        ("zero/0.weight/fp32.pt zero/optimizer_state.pt mp_rank_00_model_states.pt", "universal checkpoint of DeepS"),
        # nvidia-resiliency-ext 0.4.1
        ("iter_0000005_0_local.pt", r"nvidia-resiliency-ext wrote it, with the part of each rank"),
        # others
        ("common.pt metadata.json w/.zarray", r"Megatron Core wrote it as zarr.*keepstep\.sharded\.load"),
        ("pytorch_model.bin.index.json pytorch_model-00001-of-00002.bin", r"convert them with save_pretrained\(\)"),
        ("__0_0.distcp", r"\.metadata not found: .* or its save did not finish"),
        ("checkpoint-500/model.safetensors", r"is not a checkpoint: .*give one of checkpoint-500/"),
        ("epoch=1-step=4.ckpt last.ckpt hparams.yaml", r"give one of epoch=1-step=4\.ckpt, last\.ckpt$"),
        ("notes.txt", r"is not a checkpoint: \.metadata not found, nor an index of safetensors$"),
    ],
)
def test_a_folder_of_another_program_is_refused_with_what_to_do(tmp_path: Path, names: str, words: str) -> None:
    refused(folder(tmp_path, names), words)


def test_a_save_of_dcp_without_collectives_is_refused(tmp_path: Path) -> None:
    dcp.save(STATE, checkpoint_id=tmp_path / "theirs", use_collectives=False)
    assert files(tmp_path / "theirs") == {"__0.metadata", "__0_0.distcp"}
    refused(tmp_path / "theirs", r"use_collectives=False\) wrote it, with a description for each rank")


def test_a_format_that_is_not_that_of_the_files_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, "notes.txt")
    refused(path, "is a folder without files of torch_checkpointing", form=Format.TORCH)
    refused(path, "has no safetensors files", form=Format.SAFETENSORS)
    refused(path, r"\.metadata not found", form=Format.DCP)
    torch.save(STATE, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "is no valid safetensors file", form=Format.SAFETENSORS)
    refused(tmp_path / "a.pt", r"\.metadata not found", form=Format.DCP)


# ---- weights beside a training state


@pytest.mark.parametrize(
    "names",
    [
        # Accelerate 1.15.0, Transformers 5.24.0, and the latter with DeepSpeed
        "optimizer.bin scheduler.bin random_states_0.pkl custom_checkpoint_0.pkl",
        "optimizer.pt scheduler.pt rng_state.pth trainer_state.json training_args.bin config.json",
        "zero_to_fp32.py latest global_step1/",
    ],
)
def test_weights_are_not_taken_for_the_training_state_beside_them(tmp_path: Path, names: str) -> None:
    path = folder(tmp_path, names)
    write_safetensors({"w": STATE["w"]}, path / "model.safetensors")
    refused(path, r"beside the weights, and an import reads one of them at a time: give the file, or --format")
    assert equal(imported(path, tmp_path, form=Format.SAFETENSORS), {"w": STATE["w"]})


def test_a_folder_of_weights_may_have_other_files(tmp_path: Path) -> None:
    path = folder(tmp_path, "config.json tokenizer.json pytorch_model.bin training_args.bin trainer_state.json")
    write_safetensors({"w": STATE["w"]}, path / "model.safetensors")
    assert equal(imported(path, tmp_path), {"w": STATE["w"]})


# ---- directories of DCP with other files beside


def dcp_with(tmp_path: Path, name: str, values: Any) -> Path:
    dcp.save({"model": {"w": STATE["w"]}}, checkpoint_id=tmp_path / "theirs")
    torch.save(values, tmp_path / "theirs" / name)
    return tmp_path / "theirs"


def test_the_values_beside_a_sharded_checkpoint_of_lightning_are_read(tmp_path: Path) -> None:
    path = dcp_with(tmp_path, "meta.pt", {"epoch": 2, "hyper_parameters": {"width": 4}})
    state = imported(path, tmp_path)
    assert equal(state, {"model": {"w": STATE["w"]}, "epoch": 2, "hyper_parameters": {"width": 4}})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": 1}, r"meta\.pt and \.metadata both have model"),
        ([1], r"meta\.pt has a list, expected a dict"),
    ],
)
def test_values_that_contradict_the_directory_are_refused(tmp_path: Path, values: Any, words: str) -> None:
    refused(dcp_with(tmp_path, "meta.pt", values), words)


def test_values_of_other_classes_beside_a_directory_are_named_or_left_out(tmp_path: Path) -> None:
    path = dcp_with(tmp_path, "common.pt", {"args": zipfile.ZipInfo("x")})
    with pytest.raises(RefusedClass, match=r"common\.pt has objects of zipfile\.ZipInfo.* leaves out common\.pt"):
        import_checkpoint(path, tmp_path / "ours")
    done = import_checkpoint(path, tmp_path / "ours", skip_objects=True)
    assert done.left_out == ("common.pt",)
    assert equal(stored(tmp_path / "ours"), {"model": {"w": STATE["w"]}})


@pytest.mark.parametrize("name", ["megatron-0.14.0-2x1", "megatron-0.15.3-1x2f", "megatron-0.16.1-2x1"])
def test_a_directory_of_megatron_is_read_with_its_common_state(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(GOLDEN / f"{name}.zip") as archive:
        archive.extractall(tmp_path / "theirs")
    state = imported(tmp_path / "theirs", tmp_path)
    assert (state["iteration"], state["optimizer"]["param_groups"][0]["lr"]) == (7, 0.5)
    assert {"embedding", "layers", "optimizer.state.exp_avg.embedding"} <= state.keys()


# ---- torch_checkpointing


def test_a_folder_of_torch_checkpointing_is_read_if_one_rank_wrote_it(tmp_path: Path) -> None:
    path = folder(tmp_path, "metadata.pkl")
    torch.save({"w": STATE["w"]}, path / "model_0.pt")
    torch.save(3, path / "train_step_0.pt")
    assert equal(imported(path, tmp_path), {"model": {"w": STATE["w"]}, "train_step": 3})
    torch.save({"w": STATE["w"]}, path / "model_1.pt")
    refused(path, r"torch_checkpointing wrote it on several ranks \(model\)\. Load it with CheckpointManager\.load")


def test_a_folder_that_the_package_wrote_is_read(tmp_path: Path) -> None:
    package = pytest.importorskip("torch_checkpointing", reason="torch_checkpointing is not installed")
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    settings = package.CheckpointManager.Config.with_sync_save()
    settings.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)  # not every file system has it
    manager = settings.build()
    try:
        manager.save(str(tmp_path / "theirs"), {"model": {"w": STATE["w"]}, "step": 3})
    finally:
        manager.close()
    assert equal(imported(tmp_path / "theirs", tmp_path), {"model": {"w": STATE["w"]}, "step": 3})


# ---- single files


@pytest.mark.parametrize("name", ["last.ckpt", "state.pth", "weights.bin", "random_states_0.pkl", "anything"])
def test_a_file_of_torch_save_is_read_under_any_name(tmp_path: Path, name: str) -> None:
    torch.save(STATE, tmp_path / name)
    assert equal(imported(tmp_path / name, tmp_path), STATE)


def test_states_of_bitsandbytes_are_read(tmp_path: Path) -> None:
    """Keys of ``Linear4bit.state_dict()`` and ``Adam8bit.state_dict()`` of bitsandbytes 0.50.2: tensors and numbers."""
    quantized = {"state1": torch.zeros(64, 64, dtype=torch.uint8), "qmap1": torch.zeros(256), "absmax1": torch.ones(16)}
    state = {
        "model": {
            "0.weight": torch.zeros(2048, 1, dtype=torch.uint8),
            "0.weight.absmax": torch.zeros(64, dtype=torch.uint8),
            "0.weight.quant_state.bitsandbytes__nf4": torch.zeros(94, dtype=torch.uint8),
        },
        "optimizer": {"state": {0: {"step": 1, "__bnb_optimizer_quant_state__": quantized}}, "param_groups": []},
    }
    torch.save(state, tmp_path / "a.pt")
    assert equal(imported(tmp_path / "a.pt", tmp_path), state)


def test_a_file_of_numpy_arrays_in_safetensors_is_read(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    library.save_file({"w": np.arange(6, dtype=np.float16).reshape(2, 3)}, tmp_path / "a.safetensors")
    assert equal(imported(tmp_path / "a.safetensors", tmp_path), {"w": torch.arange(6).reshape(2, 3).half()})


def test_safetensors_are_read_under_any_name(tmp_path: Path) -> None:
    write_safetensors({"w": STATE["w"]}, tmp_path / "weights.sft")
    assert equal(imported(tmp_path / "weights.sft", tmp_path), {"w": STATE["w"]})


def _script(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), str(path))


def _export(path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    torch.export.save(program, path.with_suffix(".pt2"))
    path.with_suffix(".pt2").rename(path)


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/readme", "")


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (_script, r"is a TorchScript archive, and no file of torch\.save: save a state_dict\(\)"),
        (_export, r"is an archive of torch\.export, and no file of torch\.save"),
        (lambda path: np.savez(path.open("wb"), w=np.ones(2)), r"is an archive of numpy, and no file of torch\.save"),
        (lambda path: np.save(path.open("wb"), np.ones(2)), r"is an array of numpy, which is not read"),
        (_zip, r"is a zip file without data\.pkl"),
        (lambda path: path.write_bytes(pickle.dumps({"w": [1]})), r"it is a pickle, which is not run"),
        (lambda path: path.write_bytes(b"GGUF" + bytes(20)), r"is a GGUF file.* convert it to safetensors"),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(20)), r"is an HDF5 file"),
        (lambda path: path.write_bytes(b""), r"no file of torch\.save"),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), r"torch\.nn\.modules\.linear\.Linear.*safe_globals"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_file_that_torch_save_did_not_write_is_refused_by_its_kind(
    tmp_path: Path, write: Callable[[Path], Any], words: str
) -> None:
    write(tmp_path / "a.pt")
    refused(tmp_path / "a.pt", words)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("pytorch_model-00001-of-00002.bin", r"is one of 2 files: convert them with save_pretrained\(\)"),
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", r"has the part of one rank: DeepSpeed wrote it"),
        ("mp_rank_00_model_states.pt mp_rank_01_model_states.pt", r"has the part of one rank: DeepSpeed wrote it"),
    ],
)
def test_a_file_with_a_part_of_the_state_is_refused(tmp_path: Path, names: str, words: str) -> None:
    for name in names.split():
        torch.save(STATE, tmp_path / name)
    refused(tmp_path / names.split(maxsplit=1)[0], words)


def test_the_only_file_of_a_model_of_deepspeed_is_read(tmp_path: Path) -> None:
    torch.save({"module": STATE}, tmp_path / "mp_rank_00_model_states.pt")
    assert equal(imported(tmp_path / "mp_rank_00_model_states.pt", tmp_path), {"module": STATE})


# ---- forms of torch.save


def test_a_file_of_torch_1_6_is_read(tmp_path: Path) -> None:
    """Its zip file has no byte order, and no alignment of storages."""
    state = training_state()
    torch.save(state, tmp_path / "new.pt")
    with zipfile.ZipFile(tmp_path / "new.pt") as new, zipfile.ZipFile(tmp_path / "a.pt", "w") as old:
        for name in new.namelist():
            if name.rpartition("/")[2] not in ("byteorder", ".format_version", ".storage_alignment"):
                old.writestr(name, new.read(name))
    assert equal(imported(tmp_path / "a.pt", tmp_path), state)


def test_a_file_of_torch_before_1_6_is_read(tmp_path: Path) -> None:
    state = training_state()
    newer = ("uint16", "uint32", "uint64")
    state["tensors"] = {k: v for k, v in state["tensors"].items() if not k.startswith((*newer, "float8", "float4"))}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert equal(imported(tmp_path / "a.pt", tmp_path), state)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e8m0fnu])
def test_a_dtype_that_torch_writes_and_cannot_read_is_named(tmp_path: Path, dtype: torch.dtype) -> None:
    """Torch 2.13 writes such tensors into its format before 1.6, and its own load fails."""
    torch.save({"w": torch.zeros(4).to(dtype)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(AttributeError):
        torch.load(tmp_path / "a.pt", weights_only=True)
    refused(tmp_path / "a.pt", r"a dtype or a storage that torch does not read from its format before 1\.6")


@pytest.mark.parametrize("layout", ["sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"])
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_are_stored_or_named(tmp_path: Path, layout: str, zipped: bool) -> None:
    dense = torch.tensor([[0.0, 1.0, 0.0, 2.0], [3.0, 0.0, 0.0, 0.0]])
    block = (1, 2) if layout in ("sparse_bsr", "sparse_bsc") else None
    sparse = dense.to_sparse(layout=getattr(torch, layout), blocksize=block)
    torch.save({"x": sparse, "w": dense}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    try:
        state = imported(tmp_path / "a.pt", tmp_path)
    except UnsupportedValue as error:
        assert "['x']" in str(error)  # noqa: PT017  either is right
        done = import_checkpoint(tmp_path / "a.pt", tmp_path / "ours", skip_objects=True)
        assert done.left_out == ("x",)
        assert equal(stored(tmp_path / "ours"), {"w": dense})
    else:
        assert state["x"].layout is sparse.layout
        assert state["x"].to_dense().equal(dense)


def test_advice_of_torch_to_load_without_care_is_not_repeated(tmp_path: Path) -> None:
    torch.save({"x": Fraction(1, 2), "w": torch.ones(2)}, tmp_path / "a.pt")
    with pytest.raises(RefusedClass, match=r"fractions\.Fraction.*nothing was run.*--allow-pickle") as raised:
        import_checkpoint(tmp_path / "a.pt", tmp_path / "ours")
    assert "weights_only" not in str(raised.value)
    with zipfile.ZipFile(tmp_path / "b.pt", "w") as archive:
        archive.writestr("b/data.pkl", b"\x80\x02X\xff")
        archive.writestr("b/version", b"3")
    with pytest.raises(ForeignCheckpointError, match=r"b\.pt cannot be read") as damaged:
        import_checkpoint(tmp_path / "b.pt", tmp_path / "ours")
    assert "weights_only" not in str(damaged.value)


MLX = (
    b'{"__metadata__":{"a":"b"},"b":{"data_offsets":[20,22],"dtype":"BOOL","shape":[2]},"c":{"data_offsets":[8,16],'
    b'"dtype":"C64","shape":[1]},"s":{"data_offsets":[16,20],"dtype":"F32","shape":[]},"u":{"data_offsets":[0,8],'
    b'"dtype":"U64","shape":[1]},"w":{"data_offsets":[22,34],"dtype":"BF16","shape":[6]}}'
)
"""Header that mlx 0.32.4 writes: without padding, so that no tensor is aligned, and the last one in an odd place."""
FLAX = (
    b'{"w":{"dtype":"BF16","shape":[6],"data_offsets":[0,12]},"f8":{"dtype":"F8_E4M3","shape":[3],'
    b'"data_offsets":[12,15]}}    '
)
"""Header of ``safetensors.flax`` 0.8.0 with JAX 0.10.2."""


def _bytes(*values: torch.Tensor) -> bytes:
    return b"".join(value.reshape(-1).view(torch.uint8).numpy().tobytes() for value in values)


def test_files_of_mlx_and_jax_are_read(tmp_path: Path) -> None:
    w = torch.arange(6, dtype=torch.bfloat16)
    state = {
        "u": torch.tensor([1], dtype=torch.uint64),
        "c": torch.tensor([1 + 2j]),
        "s": torch.tensor(3.0),
        "b": torch.tensor([True, False]),
        "w": w,
    }
    (tmp_path / "a.safetensors").write_bytes(len(MLX).to_bytes(8, "little") + MLX + _bytes(*state.values()))
    assert equal(imported(tmp_path / "a.safetensors", tmp_path), state)
    other = {"w": w, "f8": torch.ones(3).to(torch.float8_e4m3fn)}
    (tmp_path / "b.safetensors").write_bytes(len(FLAX).to_bytes(8, "little") + FLAX + _bytes(*other.values()))
    import_checkpoint(tmp_path / "b.safetensors", tmp_path / "again")
    assert equal(stored(tmp_path / "again"), other)


def test_metadata_json_of_other_programs_does_not_matter(tmp_path: Path) -> None:
    path = folder(tmp_path, "metadata.json")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    refused(path, r"is not a checkpoint")
