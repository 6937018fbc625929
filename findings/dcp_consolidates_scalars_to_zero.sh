#!/usr/bin/env bash
# Guess: HuggingFaceStorageWriter with consolidation writes the values that were saved, in one safetensors file.
# Seen: each tensor without dimensions is 0 in the consolidated file; the files of the ranks have its value. A tensor of
#   integers or booleans makes the save raise a TypeError about torch.finfo.
# Version: torch 2.13.0, torch.distributed.checkpoint, with safetensors 0.8.0.
# Why it matters: temperatures, scales of quantized layers and steps are scalars. The exported model loads and computes
#   with zeros. The counter of a BatchNorm, an integer, makes the export fail after all ranks have written.
# keepstep: an import of such a folder takes scalars from the files of the ranks:
#   tests/unit/keepstep_formats/folders/test_safetensors_folders.py::test_a_consolidated_folder_is_read_with_its_scalars
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
program <<'PYTHON'
import logging
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finding import compare, show_versions
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

show_versions("torch", "safetensors")
logging.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def consolidated(name, state):
    writer = HuggingFaceStorageWriter(path=name, save_distributed=True, enable_consolidation=True)
    try:
        dcp.save(state, storage_writer=writer)
    except dcp.CheckpointException as error:
        return [type(cause[0]).__name__ for cause in error.failures.values()][0]
    (file,) = Path(name).glob("*.safetensors")
    return {key: value.tolist() for key, value in load_file(file).items()}


compare(
    "a vector 1, 2 and a scalar 3.5",
    guess={"vector": [1.0, 2.0], "scalar": 3.5},
    seen=consolidated("floats", {"vector": torch.tensor([1.0, 2.0]), "scalar": torch.tensor(3.5)}),
    known={"vector": [1.0, 2.0], "scalar": 0.0},
)
for name, value in (("integers", torch.tensor([1, 2])), ("booleans", torch.tensor([True, False]))):
    seen = consolidated(name, {"vector": value})
    compare(f"a vector of {name}", guess={"vector": value.tolist()}, seen=seen, known="TypeError")
PYTHON
