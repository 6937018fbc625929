"""Checkpoints of Megatron Core are read, and ours by it.

``golden`` has directories that Megatron Core wrote: 0.14.0 and 0.16.1 on two tensor-parallel ranks, 0.15.3 on two
data-parallel ranks with flattened ranges. tests/support/checkpoints/library_peer.py makes their state.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from keepstep.sharded import CheckpointingException, load, load_plain_tensors, maybe_load_config, remove_sharded_tensors
from tests.support import checkpoints
from tests.support.checkpoints.library_peer import World
from tests.unit.keepstep_formats.states import read_directory

VARIABLE = "KEEPSTEP_MEGATRON_PYTHON"
PEERS = [one for one in os.environ.get(VARIABLE, "").split(os.pathsep) if one]
SUPPORT = Path(checkpoints.__file__).parent
PEER = SUPPORT / "library_peer.py"
STORED = {"megatron-0.14.0-2x1": "1x1", "megatron-0.16.1-2x1": "1x1", "megatron-0.15.3-1x2f": "1x1f"}


@pytest.fixture(params=STORED)
def stored(request, tmp_path):
    with zipfile.ZipFile(SUPPORT / "golden" / f"{request.param}.zip") as archive:
        archive.extractall(tmp_path)
    return tmp_path, World("keepstep", STORED[request.param], 0)


def test_a_directory_of_megatron_is_read_with_every_value(stored) -> None:
    directory, world = stored
    world.load(str(directory))  # compares
    assert maybe_load_config(directory).sharded_backend == "torch_dist"


def test_tensors_are_removed_from_a_directory_of_megatron(stored) -> None:
    directory, _ = stored
    before = load_plain_tensors(directory)
    prefix = min(before)
    remove_sharded_tensors(directory, prefix)
    after = load_plain_tensors(directory)
    assert sorted(after) == [key for key in sorted(before) if not key.startswith(prefix)] != []
    assert all(torch.equal(one, before[key]) for key, one in after.items())


def test_an_import_reads_the_tensors_in_their_original_shape(stored) -> None:
    directory, _ = stored
    imported, plain = read_directory(directory), load_plain_tensors(directory)
    assert plain
    for key, tensor in plain.items():
        assert torch.equal(imported[key], tensor)


def test_a_flipped_byte_is_named_with_file_and_key(stored) -> None:
    directory, world = stored
    for file in directory.glob("__*.distcp"):
        data = bytearray(file.read_bytes())
        data[data.index(b"/data/0FB") + 71] ^= 1  # the first byte of a tensor, behind its name and padding
        file.write_bytes(data)
    with pytest.raises(CheckpointingException, match=r"'[\w.]+' in .*__\d_\d\.distcp is damaged: part"):
        load(world.state(is_save=False), directory)


@pytest.mark.skipif(not PEERS, reason=f"{VARIABLE} is not set: docs/testing.md, beside Megatron Core")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("python", PEERS)
def test_each_reads_what_the_other_saved_in_other_layouts(tmp_path, python) -> None:
    """Starts many processes: two layouts for each of two libraries, each loaded in three layouts."""
    version = "from importlib.metadata import version; print(version('megatron-core'))"
    has_ranges = subprocess.check_output([python, "-c", version], text=True).startswith(("0.14", "0.15"))
    suffix = "f" if has_ranges else ""
    layouts = [f"{one}{suffix}" for one in ("1x1", "2x1", "1x2", "2x2")]

    def run(program, library, *actions):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path) if library == "keepstep" else ""}
        arguments = [text for action in actions for text in action]
        said = subprocess.run(
            [program, str(PEER), library, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=False
        )
        assert said.returncode == 0, said.stdout

    for writer, reader in ((python, sys.executable), (sys.executable, python)):
        names = ["megatron" if one == python else "keepstep" for one in (writer, reader)]
        saved = [(one, str(tmp_path / f"{names[0]}-{one}")) for one in layouts[1:]]
        run(writer, names[0], *(("save", *one) for one in saved))
        run(reader, names[1], *(("load", layout, path) for _, path in saved for layout in layouts))
