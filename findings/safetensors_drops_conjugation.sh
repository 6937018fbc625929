#!/usr/bin/env bash
# Guess: safetensors stores the values of a tensor that it accepts; it refuses those that are not contiguous.
# Seen: tensor.conj() is contiguous for torch, so it is accepted, and its memory is stored: the file has the tensor
#   without the conjugation. torch.save keeps it.
# Version: safetensors 0.8.0 with torch 2.13.0.
# Why it matters: the sign of every imaginary part of stored spectra, state-space weights or rotations is wrong, with
#   the right shape and dtype. resolve_conj() before the save gives the values.
# keepstep: it stores the values of such a view:
#   tests/unit/keepstep/state/test_serialization.py::test_conjugate_and_negative_views_come_back_as_their_values
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
program <<'PYTHON'
import torch
from finding import compare, show_versions
from safetensors.torch import load_file, save_file

show_versions("safetensors", "torch")
conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
save_file({"spectrum": conjugate}, "state.safetensors")
torch.save(conjugate, "state.pt")
for name, loaded, known in (
    ("safetensors", load_file("state.safetensors")["spectrum"], [1 + 2j, 3 - 4j]),
    ("torch.save", torch.load("state.pt"), [1 - 2j, 3 + 4j]),
):
    compare(f"conjugate of 1+2j, 3-4j through {name}", guess=[1 - 2j, 3 + 4j], seen=loaded.tolist(), known=known)
PYTHON
